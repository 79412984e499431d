"""Update weights: AdamW, the storage of its state, learning-rate schedules."""

"""Update weights: AdamW, where its states are stored, learning-rate schedules."""

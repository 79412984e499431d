"""Read recordings: where a record names one, and what a model's encoder takes of it."""

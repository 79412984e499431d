"""Model folders on disk: what can be said of weight files without a model, and without Paddle."""

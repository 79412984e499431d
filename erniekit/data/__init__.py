"""file -> record -> conversation -> tokens -> packs -> batches. NumPy only; knows nothing of models."""

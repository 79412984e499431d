"""Load a tokenizer from the files of a model folder, behind one interface."""

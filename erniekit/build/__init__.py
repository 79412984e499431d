"""Build the parts of a run from its configuration, each in one place."""

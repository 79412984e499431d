"""Codecs: recordings to codes and back."""

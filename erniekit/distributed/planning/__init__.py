"""Estimate memory, traffic and pipeline bubbles of a layout without running it."""

"""Render conversations into text segments that are trained or not."""

"""Describe model families: configuration, weight names and shapes, how ranks shard them."""

"""Encoders in front of a decoder: what makes states of a recording, and puts them among the embeddings of a text."""

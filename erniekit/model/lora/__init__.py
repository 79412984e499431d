"""Adapters: small trained updates beside frozen weights, and the folders that hold them."""

"""Dividing one run between ranks: the topology, and what Paddle's fleet needs to run on CPU ranks."""

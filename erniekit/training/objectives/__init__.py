"""Compute losses: forward passes, token losses, preference losses and their reference."""

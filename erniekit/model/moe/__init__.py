"""Mixture of experts: routing, dispatch to experts on this or other ranks, and the experts."""

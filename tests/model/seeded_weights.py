"""Weights and token ids from a seed, the same on every machine and with every version of NumPy.

Recorded runs name the seed in place of the weights, which keeps them small. Imports nothing of the package, because
environments without Paddle use it, too.
"""

from __future__ import annotations

import zlib

import numpy as np


def seeded_weight(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return a float32 weight: norms from 0.4 to 1.8, and others so large that errors show, around 0."""
    spread = _spread(name)
    if spread is None:
        return (0.4 + 1.4 * _uniform(name, shape, seed)).astype(np.float32)
    return ((2 * _uniform(name, shape, seed) - 1) * np.sqrt(3) * spread).astype(np.float32)


def seeded_ids(name: str, count: int, below: int, seed: int) -> np.ndarray:
    """Return int64 token ids from 0 up to `below`."""
    return np.floor(_uniform(name, (count,), seed) * below).astype(np.int64)


def _spread(name: str) -> float | None:
    """Return the standard deviation of a weight, or None of a norm's."""
    if name.endswith("norm.weight"):
        return None
    if name.endswith("e_score_correction_bias"):
        return 0.05  # more would leave experts without any token
    return 0.3 if name.endswith(("bias", "sinks")) else 0.25


def _uniform(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return numbers in [0, 1), by splitmix64 (Steele et al., 2014) over a counter that starts where the name says."""
    start = np.uint64((zlib.crc32(name.encode()) << 32) + seed)
    with np.errstate(over="ignore"):
        state = start + np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return ((state >> np.uint64(11)).astype(np.float64) / 2**53).reshape(shape)

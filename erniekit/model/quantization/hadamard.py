"""The Hadamard rotation that spreads outliers before rounding. NumPy only."""

from __future__ import annotations

from functools import cache

import numpy as np


@cache
def hadamard(size: int) -> np.ndarray:
    """Return the orthogonal, symmetric matrix [size, size] of +-1 / sqrt(size) (Sylvester's);
    `size` is a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(size)).astype(np.float32)

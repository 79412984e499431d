"""Initial factors of adapters, and merging them into a weight, in float32. Needs no Paddle.

Layouts are the decoder's: W [in, out], A [in, r], B [r, out].
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from erniekit.errors import ConfigurationError

MIN_COLUMN_NORM = 1e-10  # DoRA's minimum for a column's norm, because a column of zeros has no direction


class Factors(NamedTuple):
    """The tensors of one adapter.

    Attributes:
        A: [in, r].
        B: [r, out].
        magnitude: [out], DoRA's column norms; None without DoRA, or if they are still those of the weight.
        start: PiSSA's initial A and B, whose product was subtracted from the frozen weight; None without PiSSA.
    """

    A: np.ndarray
    B: np.ndarray
    magnitude: np.ndarray | None = None
    start: tuple[np.ndarray, np.ndarray] | None = None


def initial_factors(path: str, shape: tuple[int, int], rank: int, seed: int) -> Factors:
    """Return factors of a zero update: B = 0, and A uniform within 1 / sqrt(in), seeded by seed and path.

    The bound is Kaiming's with a = sqrt(5), PEFT's choice.

    Args:
        shape: of W, [in, out].
    """
    inputs, outputs = shape
    digest = hashlib.sha256(path.encode()).digest()
    generator = np.random.Generator(np.random.PCG64([seed, int.from_bytes(digest[:8], "little")]))
    bound = 1.0 / np.sqrt(inputs)
    A = generator.uniform(-bound, bound, [inputs, rank]).astype(np.float32)
    return Factors(A, np.zeros([rank, outputs], np.float32))


def principal_factors(path: str, weight: np.ndarray, rank: int, scaling: float) -> Factors:
    """Return A and B with scaling * A B = the best approximation of W of this rank; both share the singular values
    evenly.

    PiSSA (Meng et al., 2024, arXiv 2404.02948), section 3, with the scaling taken out of the factors.

    Raises:
        ConfigurationError: W has fewer singular values than the rank.
    """
    if rank > min(weight.shape):
        raise ConfigurationError(
            f"lora_rank {rank}: {path} has only {min(weight.shape)} singular values, and lora_init: pissa needs as "
            f"many as the rank.\n  Set lora_rank: {min(weight.shape)} or less, or lora_init: kaiming."
        )
    left, values, right = np.linalg.svd(weight, full_matrices=False)
    root = np.sqrt(values[:rank] / scaling)
    A, B = (left[:, :rank] * root).astype(np.float32), (root[:, None] * right[:rank]).astype(np.float32)
    return Factors(A, B, start=(A, B))


def _update(A: np.ndarray, B: np.ndarray, scaling: float) -> np.ndarray:
    """Return scaling * A B as the transpose of a C-ordered array: files need that layout, and
    transposing takes time."""
    product = B.T @ A.T
    product *= np.float32(scaling)
    return product.T


def merged_weight(weight: np.ndarray, factors: Factors, scaling: float) -> np.ndarray:
    """Return the weight [in, out] whose plain linear layer computes the same as the layer with its adapter."""
    merged = _update(factors.A, factors.B, scaling)
    merged += weight
    if factors.start is not None:
        merged -= _update(*factors.start, scaling)
    if factors.magnitude is not None:
        merged *= factors.magnitude / np.maximum(np.linalg.norm(merged, axis=0), MIN_COLUMN_NORM)
    return merged

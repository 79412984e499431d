"""The numbers of an adapter and what they do to a weight, in float32. Needs no Paddle.

Layouts are the decoder's: W [in, out], A [in, r], B [r, out].
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from erniekit.errors import ConfigurationError

MIN_COLUMN_NORM = 1e-10  # DoRA counts no column of a weight as shorter, for one of zeros has no direction


class Factors(NamedTuple):
    """One adapter.

    Attributes:
        A: [in, r].
        B: [r, out].
        magnitude: [out], DoRA's lengths; None without DoRA, or where they are still those of the weight.
        start: A and B as PiSSA made them, whose product has left the frozen weight; None without PiSSA.
    """

    A: np.ndarray
    B: np.ndarray
    magnitude: np.ndarray | None = None
    start: tuple[np.ndarray, np.ndarray] | None = None


def initial_factors(path: str, shape: tuple[int, int], rank: int, seed: int) -> Factors:
    """An update of zero: B = 0, and A uniform within 1 / sqrt(in), drawn by seed and path.

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
    """scaling * A B = the best approximation of W of this rank, its singular values shared evenly between A and B.

    PiSSA (Meng et al., 2024, arXiv 2404.02948), section 3, with the scaling taken out of the factors.

    Raises:
        ConfigurationError: W has fewer singular values.
    """
    if rank > min(weight.shape):
        raise ConfigurationError(
            f"lora_rank {rank}: {path} has only {min(weight.shape)} singular values, and lora_init: pissa starts from "
            f"them.\n  Write lora_rank: {min(weight.shape)} or less, or lora_init: kaiming."
        )
    left, values, right = np.linalg.svd(weight, full_matrices=False)
    root = np.sqrt(values[:rank] / scaling)
    A, B = (left[:, :rank] * root).astype(np.float32), (root[:, None] * right[:rank]).astype(np.float32)
    return Factors(A, B, start=(A, B))


def _update(A: np.ndarray, B: np.ndarray, scaling: float) -> np.ndarray:
    """scaling * A B, in memory as its transpose: files have weights so, and turning large matrices takes time."""
    product = B.T @ A.T
    product *= np.float32(scaling)
    return product.T


def merged_weight(weight: np.ndarray, factors: Factors, scaling: float) -> np.ndarray:
    """The weight [in, out] with which the linear layer alone computes what it does with its adapter."""
    merged = _update(factors.A, factors.B, scaling)
    merged += weight
    if factors.start is not None:
        merged -= _update(*factors.start, scaling)
    if factors.magnitude is not None:
        merged *= factors.magnitude / np.maximum(np.linalg.norm(merged, axis=0), MIN_COLUMN_NORM)
    return merged

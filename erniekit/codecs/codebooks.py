"""Residual vector quantization: each level quantizes what the levels before have left (arXiv:2107.03312, algorithm 1).

Shapes: T frames, D size of a vector, K entries of a codebook, L levels.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import Tensor


def nearest(x_TD: Tensor, codebook_KD: Tensor) -> Tensor:
    """Return int64[T]: the entry at the smallest Euclidean distance of each vector, the first of several."""
    squares_K = codebook_KD.square().sum(1)
    return (squares_K - 2 * paddle.matmul(x_TD, codebook_KD, transpose_y=True)).argmin(1)


def quantize(x_TD: Tensor, codebooks: Sequence[Tensor]) -> Tensor:
    """Return the codes int64[L, T] of vectors in codebooks [K, D], from the coarsest level."""
    codes = []
    for codebook_KD in codebooks:
        codes.append(nearest(x_TD, codebook_KD))
        x_TD = x_TD - codebook_KD[codes[-1]]
    return paddle.stack(codes)


def dequantize(codes_LT: Tensor, codebooks: Sequence[Tensor]) -> Tensor:
    """Return the sum [T, D] of the entries that codes name, in no more codebooks than there are."""
    total = codebooks[0][codes_LT[0]]
    for codes_T, codebook_KD in zip(codes_LT[1:], codebooks[1:], strict=False):
        total = total + codebook_KD[codes_T]
    return total

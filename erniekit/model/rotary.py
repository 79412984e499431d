"""Rotary position embeddings (Su et al., 2021, arXiv:2104.09864) in ERNIE-4.5's interleaved form.

Channels 2i and 2i + 1 of a head form a pair that is turned by the angle position * theta^(-2i / D).
Angles, cosines and sines are float32 whatever the model's precision, as in the published models.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import paddle
from paddle.autograd import PyLayer

from erniekit.model.autograd import apply


class RotaryTables(NamedTuple):
    """Cosines and sines, float32 [T, N, D], both members of a pair holding the pair's value.

    They are repeated for each of the N heads, because Paddle's broadcasting product is 30 times slower on a CPU.
    """

    cos: paddle.Tensor
    sin: paddle.Tensor


def rotary_tables(position_ids: paddle.Tensor, heads: int, head_dim: int, theta: float) -> RotaryTables:
    """The tables of T = position_ids.size tokens and N = `heads` heads; computed once per batch."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    inverse_frequencies = paddle.to_tensor(np.repeat((theta**-exponents).astype(np.float32), 2))
    pairs = (position_ids.reshape([-1, 1]).astype("float32") * inverse_frequencies).unsqueeze(1)
    return RotaryTables(*(paddle.tile(table, [1, heads, 1]) for table in (paddle.cos(pairs), paddle.sin(pairs))))


def rotate(x_TND: paddle.Tensor, tables: RotaryTables) -> paddle.Tensor:
    """Turn the pairs of every head."""
    return apply(_Rotate, x_TND, tables)


class _Rotate(PyLayer):
    """y = x cos + (x R) sin with R the quarter turn of every pair; dx = g cos + (g sin) R^T.

    The quarter turn is a product with a D x D matrix of 0 and +-1: exact, and far faster than strided copies.
    """

    @staticmethod
    def forward(ctx, x, tables):  # type: ignore[no-untyped-def]
        ctx.tables, dtype = tables, x.dtype
        cos, sin = tables
        x = _as(x, cos.dtype)
        turned = paddle.matmul(x, _quarter_turn(x.shape[-1], x.dtype))
        return _as((x * cos).add_(turned * sin), dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (cos, sin), dtype = ctx.tables, grad.dtype
        grad = _as(grad, cos.dtype)
        turned = paddle.matmul(grad * sin, _quarter_turn(grad.shape[-1], grad.dtype), transpose_y=True)
        return _as((grad * cos).add_(turned), dtype)


def _as(x: paddle.Tensor, dtype: paddle.dtype) -> paddle.Tensor:
    return x if x.dtype == dtype else x.astype(dtype)


def _quarter_turn(size: int, dtype: paddle.dtype) -> paddle.Tensor:
    """R [D, D] with (x R)[2i] = -x[2i + 1] and (x R)[2i + 1] = x[2i]; kept, unless it is part of a recorded program."""
    if paddle.in_dynamic_mode():
        return _kept_quarter_turn(size, dtype)
    return _make_quarter_turn(size, dtype)


@lru_cache(maxsize=8)
def _kept_quarter_turn(size: int, dtype: paddle.dtype) -> paddle.Tensor:
    return _make_quarter_turn(size, dtype)


def _make_quarter_turn(size: int, dtype: paddle.dtype) -> paddle.Tensor:
    matrix = np.zeros((size, size), np.float32)
    even = np.arange(0, size, 2)
    matrix[even + 1, even] = -1.0
    matrix[even, even + 1] = 1.0
    return paddle.to_tensor(matrix).astype(dtype)

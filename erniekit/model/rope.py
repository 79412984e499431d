"""Rotary position embeddings (Su et al., 2021, arXiv:2104.09864) in both published forms.

The two channels of a pair are rotated by the angle position * frequency (see `rope_scaling`). ERNIE-4.5 pairs channels
2i and 2i + 1 of a head (interleaved); Llama and Qwen pair i and i + D / 2. Angles, cosines and sines are float32
whatever the model's precision, as in the published models.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import paddle
from paddle.autograd import PyLayer

from erniekit.model import native
from erniekit.model.architectures.rope_scaling import Frequencies
from erniekit.model.autograd import apply, disable_autocast
from erniekit.model.kernels import fused_kernels, fused_rotary
from erniekit.model.norm import rms_norm, weight_gradient_parts

KERNEL = ("rotary", "lllifpppp")
NORM_KERNEL = ("norm_rotary", "lllippfpppp")


class RotaryTables(NamedTuple):
    """Cosines and sines, float32 [T, 1, D]; both channels of a pair have the same value.

    Where Paddle's operators use them they are repeated for each of the N heads, [T, N, D], because its broadcasting
    product is 30 times slower on a CPU.
    """

    cos: paddle.Tensor
    sin: paddle.Tensor
    interleaved: bool


def rotary_tables(
    position_ids: paddle.Tensor, heads: int, frequencies: Frequencies, *, interleaved: bool
) -> RotaryTables:
    """Compute the tables of T = position_ids.size tokens and N = `heads` heads, once per batch."""
    # Repeated before the product with the positions: ONNX has no operation for it.
    per_pair = np.array(frequencies.per_pair, np.float32)
    per_channel = np.repeat(per_pair, 2) if interleaved else np.tile(per_pair, 2)
    angles = position_ids.reshape([-1, 1, 1]).astype("float32") * paddle.to_tensor(per_channel)
    if native.kernel(*KERNEL) is None:
        angles = paddle.tile(angles, [1, heads, 1])  # before cos: oneDNN's sine read its output in saved programs
    cos, sin = paddle.cos(angles), paddle.sin(angles)
    if frequencies.magnitude != 1.0:  # of the channels that turn
        magnitude = paddle.to_tensor(np.where(per_channel == 0, 1.0, frequencies.magnitude).astype(np.float32))
        cos, sin = cos * magnitude, sin * magnitude
    return RotaryTables(cos, sin, interleaved)


def apply_rotary(x_TND: paddle.Tensor, tables: RotaryTables) -> paddle.Tensor:
    """Rotate the pairs of every head of x [T, N, D]."""
    if fused_kernels().rope:
        with disable_autocast():
            return fused_rotary(x_TND, tables.cos[:, 0], tables.sin[:, 0], tables.interleaved)
    if native.kernel(*KERNEL, tables.cos, tables.sin) is not None:
        return apply(_NativeRotary, x_TND, tables)
    return apply(_ApplyRotary, x_TND, tables)


def rms_norm_rotary(
    x_TND: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float, tables: RotaryTables
) -> paddle.Tensor:
    """Rotate the pairs of every head of x [T, N, D] after its RMSNorm with weight [D]; one pass of a native kernel."""
    tokens, _, size = x_TND.shape
    fits = tables.cos.shape == [tokens, 1, size] and weight_D.shape == [size]
    if fits and native.kernel(*NORM_KERNEL, x_TND, weight_D, tables.cos, tables.sin) is not None:
        return apply(_NormRotary, x_TND, weight_D, epsilon, tables)
    return apply_rotary(rms_norm(x_TND, weight_D, epsilon), tables)


class _NormRotary(PyLayer):
    """The gradient is turned back, then goes through `norm._RMSNormFunction`."""

    @staticmethod
    def forward(ctx, x, weight, epsilon, tables):  # type: ignore[no-untyped-def]
        y, inverse_rms = paddle.empty(x.shape, x.dtype), paddle.empty(x.shape[:2], x.dtype)
        x_and_weight, rest = native.pointers(x, weight), native.pointers(tables.cos, tables.sin, y, inverse_rms)
        native.kernel(*NORM_KERNEL)(*x.shape, tables.interleaved, *x_and_weight, epsilon, *rest)
        ctx.tables, ctx.trains_weight = tables, not weight.stop_gradient
        ctx.save_for_backward(x, weight, inverse_rms)
        return y

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight, inverse_rms = ctx.saved_tensor()
        blocks, partial = weight_gradient_parts(x.shape[0], weight if ctx.trains_weight else None)
        grad, grad_x = grad.contiguous(), paddle.empty(x.shape, x.dtype)
        pointers = native.pointers(x, weight, inverse_rms, ctx.tables.cos, ctx.tables.sin, grad, grad_x, partial)
        kernel = native.kernel("norm_rotary_backward", "llllipppppppp")
        kernel(*x.shape, blocks, ctx.tables.interleaved, *pointers)
        return grad_x, None if partial is None else partial[0]


class _ApplyRotary(PyLayer):
    """y = x cos + (x R) sin, where R rotates every pair by a quarter turn; dx = g cos + (g sin) R^T.

    The quarter turn is a product with a D x D matrix of 0 and +-1: exact, and far faster than strided copies.
    """

    @staticmethod
    def forward(ctx, x, tables):  # type: ignore[no-untyped-def]
        ctx.tables, dtype = tables, x.dtype
        x = _as(x, tables.cos.dtype)
        cos, sin, interleaved = _for_all_heads(tables, x)
        rotated = paddle.matmul(x, _rotate_half_matrix(x.shape[-1], interleaved, x.dtype))
        return _as((x * cos).add_(rotated * sin), dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        dtype = grad.dtype
        grad = _as(grad, ctx.tables.cos.dtype)
        cos, sin, interleaved = _for_all_heads(ctx.tables, grad)
        rotated = paddle.matmul(
            grad * sin, _rotate_half_matrix(grad.shape[-1], interleaved, grad.dtype), transpose_y=True
        )
        return _as((grad * cos).add_(rotated), dtype)


class _NativeRotary(PyLayer):
    """`_ApplyRotary` by a native kernel, which turns the pairs, and turns gradients back.

    A class of its own: the forward pass of the other is also recorded as a program, without any choice in it.
    """

    @staticmethod
    def forward(ctx, x, tables):  # type: ignore[no-untyped-def]
        ctx.tables = tables
        return _turned(x, tables, 1.0)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return _turned(grad, ctx.tables, -1.0)


def _turned(x_TND: paddle.Tensor, tables: RotaryTables, direction: float) -> paddle.Tensor:
    """Turn every pair of x forward (1.0) or back (-1.0) by a native kernel."""
    x = native.contiguous(_as(x_TND, tables.cos.dtype))
    if tables.cos.shape != [x.shape[0], 1, x.shape[2]]:
        raise ValueError(f"the tables are {tables.cos.shape}, and x is {x.shape}")
    y = paddle.empty(x.shape, x.dtype)
    native.kernel(*KERNEL)(*x.shape, tables.interleaved, direction, *native.pointers(x, tables.cos, tables.sin, y))
    return _as(y, x_TND.dtype)


def _for_all_heads(tables: RotaryTables, like_TND: paddle.Tensor) -> RotaryTables:
    if not paddle.in_dynamic_mode() or tables.cos.shape[1] == like_TND.shape[1]:
        return tables
    return RotaryTables(tables.cos.expand_as(like_TND), tables.sin.expand_as(like_TND), tables.interleaved)


def _as(x: paddle.Tensor, dtype: paddle.dtype) -> paddle.Tensor:
    return x if x.dtype == dtype else x.astype(dtype)


def _rotate_half_matrix(size: int, interleaved: bool, dtype: paddle.dtype) -> paddle.Tensor:
    """Return R [D, D] with (x R)[a] = -x[b] and (x R)[b] = x[a] for every pair (a, b); cached in eager mode only."""
    if paddle.in_dynamic_mode():
        return _cached_rotate_half_matrix(size, interleaved, dtype)
    return _make_rotate_half_matrix(size, interleaved, dtype)


@lru_cache(maxsize=8)
def _cached_rotate_half_matrix(size: int, interleaved: bool, dtype: paddle.dtype) -> paddle.Tensor:
    return _make_rotate_half_matrix(size, interleaved, dtype)


def _make_rotate_half_matrix(size: int, interleaved: bool, dtype: paddle.dtype) -> paddle.Tensor:
    matrix = np.zeros((size, size), np.float32)
    pair = np.arange(size // 2)
    first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + size // 2)
    matrix[second, first] = -1.0
    matrix[first, second] = 1.0
    turn = paddle.to_tensor(matrix)
    # In two steps: paddlenlp patches `to_tensor`, and saving a program never ends if a call is chained to it.
    return turn.astype(dtype)

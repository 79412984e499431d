"""Attention over FlashMask's columns by our kernel in C, on a CPU in float32; `attention.py` has the other ways.

It keeps the logarithm of each softmax's sum instead of probabilities. Dropout draws each decision from the seed, the
query head, the query and the key, so that backward and recomputation draw the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle.autograd import PyLayer

from erniekit.model import native
from erniekit.model.autograd import apply, filter_gradients, needs_grad
from erniekit.model.column_plan import COLUMN_TILE, ColumnPlan

LARGEST_HEAD = 256  # MAX_WIDTH in attention.c
_PLAN = "llllllppp"  # tokens, heads, key heads, mask heads, head size, tiles; tiles, bounds, extremes
_FORWARD = _PLAN + "ll" + "pppp" + "pp"
_BACKWARD = _PLAN + "ll" + "pppp" + "ppplpppp"


def has_native_attention(q_BSHD: paddle.Tensor, k_BSKD: paddle.Tensor, v_BSKD: paddle.Tensor) -> bool:
    """Return whether the kernel computes attention of these tensors, apart from their strides."""
    if q_BSHD.shape[-1] > LARGEST_HEAD or any(x.dtype != paddle.float32 for x in (q_BSHD, k_BSKD, v_BSKD)):
        return False
    return native.kernel("attention_forward", _FORWARD) is not None


def native_attention(
    q_BSHD: paddle.Tensor,
    k_BSKD: paddle.Tensor,
    v_BSKD: paddle.Tensor,
    columns: ColumnPlan,
    dropout: float,
    key: Sequence[int],
) -> paddle.Tensor:
    """Return softmax(q k^T / sqrt(D) + mask) v, float32 [B, S, H, D]; ask `has_native_attention` first."""
    tokens = q_BSHD.shape[0] * q_BSHD.shape[1]
    if columns.tokens != tokens:
        raise ValueError(f"the plan covers {columns.tokens} tokens, the queries {tokens}")
    drop = _Dropout.of(dropout, key)
    return apply(_NativeAttention, *(native.contiguous(x) for x in (q_BSHD, k_BSKD, v_BSKD)), columns, drop)


class _Dropout(NamedTuple):
    seed: int
    dropped: int  # of 65,536 probabilities

    @classmethod
    def of(cls, probability: float, key: Sequence[int]) -> _Dropout:
        if not probability:
            return cls(0, 0)
        return cls(int(np.random.SeedSequence(list(key)).generate_state(1, np.uint64)[0]), round(probability * 65536))


class _NativeAttention(PyLayer):
    @staticmethod
    def forward(ctx, q, k, v, columns, drop):  # type: ignore[no-untyped-def]
        ctx.needs_input_grad = needs_grad(q, k, v)
        ctx.columns, ctx.drop = columns, drop
        out, lse = paddle.empty_like(q), paddle.empty([q.shape[2], columns.tokens], "float32")
        forward = native.kernel("attention_forward", _FORWARD, q, k, v)
        width, key_heads = _width(q), k.shape[2]
        workspace = _workspace(columns, key_heads * (q.shape[3] + width))
        forward(*_plan_arguments(q, k, columns), *drop, *native.pointers(q, k, v, workspace, out, lse))
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[no-untyped-def]
        q, k, v, out, lse = ctx.saved_tensor()
        grad_out, columns = native.contiguous(grad_out), ctx.columns
        backward = native.kernel("attention_backward", _BACKWARD, q, k, v, out, lse, grad_out)
        (heads, size), key_heads, width = q.shape[2:], k.shape[2], _width(q)
        workspace = _workspace(columns, 2 * key_heads * size + (key_heads + 2 * heads) * width)
        gradients = [paddle.empty_like(x) for x in (q, k, v)]
        inputs = native.pointers(q, k, v, workspace, out, lse, grad_out)
        segments = (len(columns.segments), columns.segments.ctypes.data)
        backward(*_plan_arguments(q, k, columns), *ctx.drop, *inputs, *segments, *native.pointers(*gradients))
        return filter_gradients(gradients, ctx.needs_input_grad)


def _plan_arguments(q: paddle.Tensor, k: paddle.Tensor, columns: ColumnPlan) -> list[Any]:
    mask_heads, tiles = columns.bounds.shape[:2]
    arrays = [array.ctypes.data for array in (columns.tiles, columns.bounds, columns.extremes)]
    return [columns.tokens, q.shape[2], k.shape[2], mask_heads, q.shape[3], tiles, *arrays]


def _workspace(columns: ColumnPlan, numbers_per_position: int) -> paddle.Tensor:
    return paddle.empty([len(columns.tiles) * COLUMN_TILE * numbers_per_position], "float32")


def _width(q: paddle.Tensor) -> int:
    """Return the head size rounded up to the longest vectors of a path, 16 numbers."""
    return -(-q.shape[3] // 16) * 16

"""Attention of all states of a window to those of its sound, on a CPU: our kernel, or batched products of Paddle's.

Shapes: A windows, S states, N heads, D head size; a row is a head of a window, and there are R = A * N of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from erniekit.model.attention_plan import MASKED
from erniekit.model.autograd import apply, filter_gradients, needs_grad
from erniekit.model.column_plan import ColumnPlan, plan_columns
from erniekit.model.native_attention import has_native_attention, native_attention
from erniekit.model.threads import parallel_map

MAX_SCORES = 512 << 10  # of one product: they stay in the processor's cache
MAX_SAVED_SCORES = 4 << 20  # probabilities kept for backward, numbers per layer; above this they are recomputed


class WindowAttention(NamedTuple):
    """The attention of a batch of windows, shared by all layers, in the place of an `AttentionPlan`.

    Attributes:
        seen: how many keys of each window, the first ones and at least one, its queries see.
    """

    seen: tuple[int, ...]

    def attend(self, q_ASND: paddle.Tensor, k_ASND: paddle.Tensor, v_ASND: paddle.Tensor) -> paddle.Tensor:
        """Return softmax(q k^T / sqrt(D)) v, [A, S, N, D]."""
        if has_native_attention(q_ASND, k_ASND, v_ASND):
            return native_attention(q_ASND, k_ASND, v_ASND, _columns(self.seen, q_ASND.shape[1]), 0.0, ())
        return apply(_WindowAttention, q_ASND, k_ASND, v_ASND, self.seen)


@lru_cache(maxsize=4)
def _columns(seen_A: tuple[int, ...], states: int) -> ColumnPlan:
    """Plan the attention of windows in which all queries see the first keys, and none the others."""
    is_seen = np.arange(states) < np.array(seen_A)[:, None]
    indices_A1S2 = np.stack([np.where(is_seen, states, 0), np.zeros_like(is_seen, int)], -1)[:, None]
    return plan_columns(indices_A1S2.astype(np.int32), causal=False)


class _Part(NamedTuple):
    """Rows that are computed at once, the tiles of their queries, and how many keys some of them see."""

    rows: slice
    tiles: tuple[slice, ...]
    keys: int


class _WindowAttention(PyLayer):
    """With P the probabilities and O = P V the gradients are
        dV = P^T dO,   dP = dO V^T,   dS = P * (dP - rowsum(dO * O)),   dQ = dS K,   dK = dS^T Q.

    What is added to every score of a key (the mask) or of a query (- rowsum) is one more column of the factors, because
    a product with it costs less than a pass over the scores.
    """

    @staticmethod
    def forward(ctx, q, k, v, seen_A):  # type: ignore[no-untyped-def]
        ctx.needs_input_grad, ctx.shape = needs_grad(q, k, v), q.shape
        windows, states, heads, size = q.shape
        q, k, v = (_rows(x) for x in (q, k, v))
        ones = paddle.ones([windows * heads, states, 1], q.dtype)
        q = paddle.concat([q * size**-0.5, ones], -1)
        k = paddle.concat([k, _mask(seen_A, states, heads).astype(q.dtype)], -1)
        ctx.parts = _parts(seen_A, states, heads)
        keep = any(ctx.needs_input_grad) and windows * heads * states**2 <= MAX_SAVED_SCORES

        def forward(part: _Part) -> tuple[paddle.Tensor, list[paddle.Tensor]]:
            outputs, kept = [], []
            for tile in part.tiles:
                probabilities = _probabilities(q[part.rows, tile], k[part.rows, : part.keys])
                outputs.append(paddle.matmul(probabilities, v[part.rows, : part.keys]))
                if keep:
                    kept.append(probabilities)
            return _joined(outputs, 1), kept

        results = parallel_map(forward, ctx.parts)
        out = _joined([output for output, _ in results], 0)
        ctx.save_for_backward(q, k, v, out, *(kept for _, of_part in results for kept in of_part))
        return _windows(out, ctx.shape)

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[no-untyped-def]
        q, k, v, out, *kept = ctx.saved_tensor()
        grad = _rows(grad_out)
        size = grad.shape[-1]
        row_sums = paddle.matmul(grad * out, paddle.full([size, 1], -1.0, grad.dtype))
        grad_and_sums = paddle.concat([grad, row_sums], -1)
        v_and_ones = paddle.concat([v, paddle.ones_like(row_sums)], -1)

        def backward(number: int) -> tuple[paddle.Tensor, ...]:
            rows, tiles, keys = ctx.parts[number]
            first = sum(len(part.tiles) for part in ctx.parts[:number])
            of_queries, of_keys, of_values = [], [], []
            for index, tile in enumerate(tiles):
                probabilities = kept[first + index] if kept else _probabilities(q[rows, tile], k[rows, :keys])
                d_scores = paddle.matmul(grad_and_sums[rows, tile], v_and_ones[rows, :keys], transpose_y=True)
                d_scores = d_scores.multiply_(probabilities)
                of_queries.append(paddle.matmul(d_scores, k[rows, :keys, :size]))
                of_keys.append(paddle.matmul(d_scores, q[rows, tile, :size], transpose_x=True))
                of_values.append(paddle.matmul(probabilities, grad[rows, tile], transpose_x=True))
            unseen = [0, 0, 0, k.shape[1] - keys, 0, 0]
            dk, dv = (F.pad(paddle.add_n(tiled), unseen) for tiled in (of_keys, of_values))
            return _joined(of_queries, 1).scale_(size**-0.5), dk, dv

        gradients = zip(*parallel_map(backward, range(len(ctx.parts))), strict=True)
        return filter_gradients([_windows(_joined(parts, 0), ctx.shape) for parts in gradients], ctx.needs_input_grad)


def _probabilities(q: paddle.Tensor, k: paddle.Tensor) -> paddle.Tensor:
    return F.softmax_(paddle.matmul(q, k, transpose_y=True))


def _parts(seen_A: Sequence[int], states: int, heads: int) -> list[_Part]:
    """Cut the scores [R, S, S] into parts of several rows, or of a tile of a row's queries."""
    rows = len(seen_A) * heads
    at_once = max(1, min(rows, MAX_SCORES // states**2))
    count = -(-(at_once * states**2) // MAX_SCORES)
    tiles = tuple(slice(*ends) for ends in _cut(states, count))
    parts = _cut(rows, -(-rows // at_once))
    return [_Part(slice(a, b), tiles, max(seen_A[a // heads : -(-b // heads)])) for a, b in parts]


def _cut(length: int, parts: int) -> list[tuple[int, int]]:
    """Return the ends of parts of about the same length."""
    return list(pairwise(np.linspace(0, length, parts + 1).round().astype(int).tolist()))


def _mask(seen_A: Sequence[int], states: int, heads: int) -> paddle.Tensor:
    """Return what is added to the scores of each key, [R, S, 1]."""
    is_masked = np.arange(states) >= np.array(seen_A)[:, None]
    return paddle.to_tensor(np.repeat(np.where(is_masked, np.float32(MASKED), np.float32(0)), heads, 0)[..., None])


def _rows(x_ASND: paddle.Tensor) -> paddle.Tensor:
    """Return [R, S, D]."""
    windows, states, heads, size = x_ASND.shape
    order = _swapped(windows, states, heads)
    return paddle.gather(x_ASND.reshape([-1, size]), order).reshape([-1, states, size])


def _windows(x_RSD: paddle.Tensor, shape: Sequence[int]) -> paddle.Tensor:
    """Return [A, S, N, D] of this shape."""
    windows, states, heads, size = shape
    return paddle.gather(x_RSD.reshape([-1, size]), _swapped(windows, heads, states)).reshape(shape)


@lru_cache(maxsize=16)
def _swapped(outer: int, second: int, third: int) -> paddle.Tensor:
    """Return the places of the vectors [outer, second, third] in the order [outer, third, second], int64: on a CPU a
    gather takes a twentieth of the time of a transposition."""
    return paddle.to_tensor(np.arange(outer * second * third).reshape(outer, second, third).swapaxes(1, 2).ravel())


def _joined(parts: Sequence[paddle.Tensor], axis: int) -> paddle.Tensor:
    return parts[0] if len(parts) == 1 else paddle.concat(list(parts), axis)

"""Attention on a CPU with Paddle's operators, in blocks of scores; `native_attention.py` has our kernel.

Shapes: T tokens of all rows of a batch, K key heads, G = H / K query heads that share one, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from erniekit.model.attention_plan import MASKED, AttentionBlock
from erniekit.model.autograd import filter_gradients, needs_grad
from erniekit.model.norm import expand_like
from erniekit.model.randomness import MaskStream
from erniekit.model.threads import parallel_map

if TYPE_CHECKING:
    from erniekit.model.attention import AttentionPlan

SOFTMAX_FLOOR = 2e-28  # above e^-64, to which Paddle's CPU softmax raises smaller probabilities, also of masked entries
MAX_SAVED_SCORES = 4 << 20  # probabilities kept for backward, numbers per layer; above this they are recomputed


def _exact_softmax_(scores: paddle.Tensor) -> paddle.Tensor:
    """Compute a softmax in place, with true zeros where Paddle's kernel leaves its floor (see SOFTMAX_FLOOR)."""
    return F.relu_(F.softmax_(scores).scale_(1.0, bias=-SOFTMAX_FLOOR))


class BlockMask(NamedTuple):
    """The masks of one block.

    Attributes:
        additive: [queries * G, keys], or with a leading axis K if key heads differ; of a causal block only the last
            tile of keys, which are those of its queries.
        live_rows: 0 / 1 rows [1 or K, queries * G, 1] if some queries see no key; else None.
    """

    additive: paddle.Tensor | None
    live_rows: paddle.Tensor | None

    def mask_(self, scores: paddle.Tensor, head: int) -> paddle.Tensor:
        """Add the mask of a key head to its scores, in place."""
        if self.additive is None:
            return scores
        additive = self.additive[head] if self.additive.ndim == 3 else self.additive
        return scores.add_(additive.astype(scores.dtype))

    def clear_dead_(self, probabilities: paddle.Tensor, head: int) -> paddle.Tensor:
        """Set the probabilities of queries that see no key to zero, in place."""
        if self.live_rows is None:
            return probabilities
        live = self.live_rows[head if self.live_rows.shape[0] > 1 else 0]
        return probabilities.multiply_(live.astype(probabilities.dtype))


def block_mask(block: AttentionBlock, queries: int, keys: int, query_heads: int, key_heads: int) -> BlockMask:
    """Return the mask of a block of so many queries and keys."""
    group = query_heads // key_heads
    if block.causal:
        return BlockMask(_causal_mask(queries, group), None)
    if block.masked is None:
        return BlockMask(None, None)
    mask_heads = block.masked.shape[0]
    if mask_heads == query_heads:
        rows = block.masked.reshape(key_heads, group, queries, keys).swapaxes(1, 2)
    else:
        rows = np.broadcast_to(block.masked[:, :, None], (mask_heads, queries, group, keys))
    rows = rows.reshape(-1, queries * group, keys)
    live = None
    if block.has_dead_rows:
        live = paddle.to_tensor((~rows.all(-1, keepdims=True)).astype(np.float32))
    if mask_heads == 1:
        rows = rows[0]
    return BlockMask(paddle.to_tensor(np.where(rows, np.float32(MASKED), np.float32(0))), live)


@lru_cache(maxsize=64)
def _causal_mask(tokens: int, group: int) -> paddle.Tensor:
    """Return the additive causal mask [tokens * group, tokens] of a tile against itself."""
    row = np.repeat(np.arange(tokens), group)[:, None]
    return paddle.to_tensor(np.where(np.arange(tokens) > row, np.float32(MASKED), np.float32(0)))


class BlockAttention(PyLayer):
    """Attention block by block with a manual backward pass; key heads are computed concurrently.

    For each key head its queries are [T * G, D] and its keys [T, D] (T = B * S tokens, G = H / K), so that every tile
    of tokens is a range of rows, and a group of query heads shares one product with its key head.
    With P the probabilities, M the dropout mask and O = (P * M) V, the gradients are
        dV = (P * M)^T dO,   dP = M * (dO V^T),   dS = P * (dP - rowsum(dO * O)),   dQ = dS K,   dK = dS^T Q,
    where rowsum(dO * O) equals rowsum(P * dP) (Dao et al., 2022, arXiv:2205.14135).
    """

    @staticmethod
    def forward(ctx, q, k, v, plan, dropout, key):  # type: ignore[no-untyped-def]
        kernel = _BlockKernel(plan, q, k.shape[2], dropout, key)
        ctx.needs_input_grad = needs_grad(q, k, v)
        keep = any(ctx.needs_input_grad) and kernel.score_count() <= MAX_SAVED_SCORES
        results = parallel_map(lambda head: kernel.forward(head, q, k, v, keep), range(kernel.key_heads))
        out = kernel.merge_heads([out for out, _ in results], q.shape)
        kept = [probabilities for _, of_head in results for probabilities in of_head]
        ctx.save_for_backward(q, k, v, out, *kept)  # saved through Paddle, so that recomputation can drop them
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[no-untyped-def]
        q, k, v, out, *kept = ctx.saved_tensor()
        kernel = ctx.kernel
        row_sums = kernel.row_sums(grad_out, out)

        def backward(head: int) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
            blocks = len(kept) // kernel.key_heads
            return kernel.backward(head, q, k, v, grad_out, row_sums, kept[head * blocks : (head + 1) * blocks])

        by_head = parallel_map(backward, range(kernel.key_heads))
        gradients = [
            kernel.merge_heads(parts, like.shape)
            for parts, like in zip(zip(*by_head, strict=True), (q, k, v), strict=True)
        ]
        return filter_gradients(gradients, ctx.needs_input_grad)


class _BlockRows(NamedTuple):
    """The rows of a block's queries and keys among the rows of a key head."""

    queries: slice
    keys: slice


class _BlockKernel:
    """Forward and backward pass of one key head over the blocks of a plan."""

    def __init__(
        self, plan: AttentionPlan, q_BSHD: paddle.Tensor, key_heads: int, dropout: float, key: Sequence[int]
    ) -> None:
        batch, length, query_heads, self.head_dim = q_BSHD.shape
        self.tokens, self.key_heads, self.group = batch * length, key_heads, query_heads // key_heads
        self.dropout, self.key = dropout, key
        self.lengths = plan.blocks.tile_lengths
        if sum(self.lengths) != self.tokens:
            raise ValueError(f"the plan covers {sum(self.lengths)} tokens, the queries {self.tokens}")
        self.blocks = plan.blocks
        self.masks = plan.block_masks(query_heads, key_heads)
        self.rows_of_heads = plan.rows_of_heads(self.tokens, key_heads)
        self.starts = [0, *np.cumsum(self.lengths).tolist()]

    def score_count(self) -> int:
        return self.key_heads * self.group * self.blocks.score_count()

    def forward(self, head, q, k, v, keep):  # type: ignore[no-untyped-def]
        """Return the output of a key head [T, G * D], and the probabilities of its blocks if `keep` is set."""
        q, k, v = self._queries(q, head), self._scaled_keys(k, head), self._of_head(v, head)
        stream = self._stream(head)
        out, kept = self._empty_tiles(), []
        for block, mask, rows in self._blocks():
            probabilities = self._probabilities(q[rows.queries], k[rows.keys], block, mask, head)
            if keep:
                kept.append(probabilities)
            if stream:
                probabilities = probabilities * stream.next(probabilities.shape, probabilities.dtype)
            out[block.query_tile] = paddle.matmul(probabilities, v[rows.keys])
        return self._concat_tiles(out, q.dtype), kept

    def backward(self, head, q, k, v, grad_out, row_sums, kept):  # type: ignore[no-untyped-def]
        """Return the gradients of the queries [T, G * D], keys and values [T, D] of a key head."""
        q, k, v = self._queries(q, head), self._scaled_keys(k, head), self._of_head(v, head)
        grad_out, row_sums = self._queries(grad_out, head), self._of_head(row_sums, head).reshape([-1, 1])
        stream = self._stream(head)
        dq, dk, dv = self._empty_tiles(), paddle.zeros_like(k), paddle.zeros_like(v)
        for number, (block, mask, rows) in enumerate(self._blocks()):
            q_rows, grad = q[rows.queries], grad_out[rows.queries]
            probabilities = kept[number] if kept else self._probabilities(q_rows, k[rows.keys], block, mask, head)
            d_scores = paddle.matmul(grad, v[rows.keys], transpose_y=True)
            dropped = probabilities
            if stream:
                dropout_mask = stream.next(probabilities.shape, probabilities.dtype)
                dropped = probabilities * dropout_mask
                d_scores = d_scores.multiply_(dropout_mask)
            dv[rows.keys].add_(paddle.matmul(dropped, grad, transpose_x=True))
            d_scores = d_scores.subtract_(expand_like(row_sums[rows.queries], d_scores)).multiply_(probabilities)
            dq[block.query_tile] = paddle.matmul(d_scores, k[rows.keys])
            dk[rows.keys].add_(paddle.matmul(d_scores, q_rows, transpose_x=True))
        return self._concat_tiles(dq, q.dtype), dk.scale_(self.head_dim**-0.5), dv

    def row_sums(self, a_BSHD: paddle.Tensor, b_BSHD: paddle.Tensor) -> paddle.Tensor:
        """Return the sum over D of a * b, [T, H]."""
        ones = paddle.ones([self.head_dim, 1], dtype=a_BSHD.dtype)
        return paddle.matmul((a_BSHD * b_BSHD).reshape([-1, self.head_dim]), ones).reshape([self.tokens, -1])

    def merge_heads(self, heads: Sequence[paddle.Tensor], shape: Sequence[int]) -> paddle.Tensor:
        """Concatenate [T, ...] of every key head into [B, S, N, D]."""
        return (heads[0] if len(heads) == 1 else paddle.concat(list(heads), axis=1)).reshape(shape)

    def _blocks(self) -> Iterator[tuple[AttentionBlock, BlockMask, _BlockRows]]:
        for block, mask in zip(self.blocks.blocks, self.masks, strict=True):
            start, stop = self.starts[block.query_tile], self.starts[block.query_tile + 1]
            keys = slice(self.starts[block.first_key_tile], self.starts[block.end_key_tile])
            yield block, mask, _BlockRows(slice(start * self.group, stop * self.group), keys)

    def _of_head(self, x: paddle.Tensor, head: int) -> paddle.Tensor:
        """Select one key head, [T, r * D], of x [B, S, K * r, D] or of any shape with the same order of values."""
        rows = x.reshape([self.tokens * self.key_heads, -1])
        return rows if self.key_heads == 1 else paddle.gather(rows, self.rows_of_heads[head])

    def _queries(self, x: paddle.Tensor, head: int) -> paddle.Tensor:
        return self._of_head(x, head).reshape([-1, self.head_dim])

    def _scaled_keys(self, k: paddle.Tensor, head: int) -> paddle.Tensor:
        """Return keys divided by sqrt(D); scaling them is cheaper than scaling the queries, which are more."""
        return self._of_head(k, head) * self.head_dim**-0.5

    def _stream(self, head: int) -> MaskStream | None:
        return MaskStream((*self.key, head), self.dropout) if self.dropout else None

    def _probabilities(self, q, k, block, mask, head):  # type: ignore[no-untyped-def]
        """Return the softmax of one block's scores, [queries * G, keys]; exact zeros in rows that see no key."""
        own = self.lengths[block.query_tile]
        if block.causal and len(k) > own:
            seen = paddle.matmul(q, k[:-own], transpose_y=True)
            scores = paddle.concat([seen, mask.mask_(paddle.matmul(q, k[-own:], transpose_y=True), head)], axis=1)
        else:
            scores = mask.mask_(paddle.matmul(q, k, transpose_y=True), head)
        return mask.clear_dead_(_exact_softmax_(scores), head)

    def _empty_tiles(self) -> list[paddle.Tensor | None]:
        return [None] * len(self.lengths)

    def _concat_tiles(self, tiles: list[paddle.Tensor | None], dtype: paddle.dtype) -> paddle.Tensor:
        """Concatenate tiles of queries to [T, G * D], with zeros for tiles without a block."""
        present = [
            paddle.zeros([length * self.group, self.head_dim], dtype) if tile is None else tile
            for tile, length in zip(tiles, self.lengths, strict=True)
        ]
        return (present[0] if len(present) == 1 else paddle.concat(present)).reshape([self.tokens, -1])

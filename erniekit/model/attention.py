"""Attention over documents: FlashMask on a GPU, an exact equivalent on a CPU, a dense mask on request.

The layout is Paddle's: queries [B, S, H, D], keys and values [B, S, K, D], where K divides H (grouped-query attention:
query head h reads key head h // (H / K)). A query that sees no key yields exact zeros and no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from erniekit.model.attention_plan import AttentionBlock, BlockPlan, masked_region, plan_blocks
from erniekit.model.attention_sinks import with_sink_key
from erniekit.model.autograd import filter_gradients, needs_grad
from erniekit.model.column_plan import ColumnPlan, plan_columns
from erniekit.model.device import has_flashmask_kernel
from erniekit.model.native_attention import has_native_attention, native_attention
from erniekit.model.norm import expand_like
from erniekit.model.randomness import MaskStream
from erniekit.model.threads import parallel_map

MASKED = -1e30  # far below any score but finite: a softmax over masked entries only does not give NaN
SOFTMAX_FLOOR = 2e-28  # above e^-64, to which Paddle's CPU softmax raises smaller probabilities, also of masked entries
MAX_SAVED_SCORES = 4 << 20  # probabilities kept for backward, numbers per layer; above this they are recomputed


def dense_mask_bytes(batch: int, length: int, mask_heads: int = 1) -> int:
    """Return the size in bytes of the float32 mask that `AttentionPlan.build(..., dense=True)` allocates."""
    return 4 * batch * mask_heads * length * length


class AttentionPlan:
    """The attention of one batch; built once and shared by all layers.

    With `indices` FlashMask's kernel runs, with `mask` (dense) Paddle's operators; with neither, attention on a CPU
    runs by `columns` (the native kernel) or by `blocks`, which are planned when they are asked for.
    """

    def __init__(
        self,
        *,
        causal: bool,
        indices: paddle.Tensor | None = None,
        blocks: BlockPlan | None = None,
        mask: paddle.Tensor | None = None,
        live_rows: paddle.Tensor | None = None,
        startend_row_indices: np.ndarray | None = None,
    ) -> None:
        self.causal, self.indices, self.mask, self.live_rows = causal, indices, mask, live_rows
        self._startend_row_indices = startend_row_indices  # what was planned, for plans with a window
        self._blocks = blocks
        self._columns: ColumnPlan | None = None
        self._windowed: dict[int, AttentionPlan] = {}
        self._with_sink: AttentionPlan | None = None
        self._block_masks: dict[tuple[int, int], list[_BlockMask]] = {}
        self._rows_of_heads: dict[tuple[int, int], list[paddle.Tensor]] = {}

    @classmethod
    def build(cls, startend_row_indices: np.ndarray, causal: bool = True, dense: bool = False) -> AttentionPlan:
        """Plan the attention that FlashMask's indices describe (see `attention_plan`).

        Args:
            startend_row_indices: int32 [B, Hm, S, n].
            dense: allocate a mask of `dense_mask_bytes(B, S, Hm)` and attend over the full square.
        """
        indices = np.asarray(startend_row_indices, np.int32)
        widths = (1, 2) if causal else (2, 4)
        if indices.ndim != 4 or indices.shape[-1] not in widths:
            raise ValueError(
                f"startend_row_indices must be [B, Hm, S, n] with n in {widths} when causal is {causal}; "
                f"got shape {list(indices.shape)}"
            )
        if dense:
            whole = slice(0, indices.shape[2])
            masked = np.stack([masked_region(row, causal, whole, whole) for row in indices])
            dead = masked.all(-1, keepdims=True)
            mask = paddle.to_tensor(np.where(masked, np.float32(MASKED), np.float32(0)))
            live_rows = paddle.to_tensor(~dead) if dead.any() else None
            return cls(causal=causal, mask=mask, live_rows=live_rows, startend_row_indices=indices)
        if has_flashmask_kernel():
            return cls(causal=causal, indices=paddle.to_tensor(indices), startend_row_indices=indices)
        return cls(causal=causal, startend_row_indices=indices)

    @property
    def blocks(self) -> BlockPlan:
        """The blocks that Paddle's operators compute on a CPU."""
        if self._blocks is None:
            assert self._startend_row_indices is not None
            self._blocks = plan_blocks(self._startend_row_indices, self.causal)
        return self._blocks

    @property
    def columns(self) -> ColumnPlan:
        """The bounds that the native kernel reads."""
        if self._columns is None:
            assert self._startend_row_indices is not None
            self._columns = plan_columns(self._startend_row_indices, self.causal)
        return self._columns

    def windowed(self, window: int) -> AttentionPlan:
        """Return the plan in which a query sees only the last `window` positions, its own included.

        It is made once for each window, and is this plan itself where no document is longer than the window.
        """
        if window not in self._windowed:
            indices = self._startend_row_indices
            assert indices is not None and self.causal and indices.shape[-1] == 1, "windows are of causal documents"
            columns = np.arange(indices.shape[2], dtype=np.int32)[None, None, :, None]
            narrowed = np.minimum(indices, columns + np.int32(window))
            unchanged = bool((narrowed == indices).all())
            self._windowed[window] = self if unchanged else AttentionPlan.build(narrowed, dense=self.mask is not None)
        return self._windowed[window]

    def with_sink(self) -> AttentionPlan:
        """Return the plan of rows with one more key in front, which all queries of the row see; made once."""
        if self._with_sink is None:
            indices = self._startend_row_indices
            assert indices is not None and self.causal and indices.shape[-1] == 1, "sinks are of causal documents"
            length = np.int32(indices.shape[2] + 1)
            shifted = np.pad(indices + np.int32(1), ((0, 0), (0, 0), (1, 0), (0, 0)), constant_values=length)
            self._with_sink = AttentionPlan.build(shifted, dense=self.mask is not None)
        return self._with_sink

    def attend(
        self,
        q_BSHD: paddle.Tensor,
        k_BSKD: paddle.Tensor,
        v_BSKD: paddle.Tensor,
        *,
        layer: int = 0,
        dropout: float = 0.0,
        key: Sequence[int] = (0,),
        window: int | None = None,
        sinks_H: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        """Run attention for a decoder layer; a key-value cache has the same method (only there `layer` matters)."""
        del layer
        plan = self if window is None else self.windowed(window)
        if sinks_H is not None:
            inputs = with_sink_key(q_BSHD, k_BSKD, v_BSKD, sinks_H)
            out_BSHD = attention(*inputs, plan.with_sink(), dropout=dropout, key=key)
            return out_BSHD[:, 1:, :, : q_BSHD.shape[-1]]
        return attention(q_BSHD, k_BSKD, v_BSKD, plan, dropout=dropout, key=key)

    def block_masks(self, query_heads: int, key_heads: int) -> list[_BlockMask]:
        """Return the additive mask of every block, in the order of `blocks`, for these numbers of heads."""
        heads = (query_heads, key_heads)
        if heads not in self._block_masks:
            lengths = self.blocks.tile_lengths
            self._block_masks[heads] = [
                _block_mask(block, lengths[block.query_tile], self.blocks.key_count(block), query_heads, key_heads)
                for block in self.blocks.blocks
            ]
        return self._block_masks[heads]

    def rows_of_heads(self, tokens: int, key_heads: int) -> list[paddle.Tensor]:
        """Return for every key head the indices of its rows, int64 [T], among rows ordered (token, key head)."""
        if (tokens, key_heads) not in self._rows_of_heads:
            numbers = np.arange(tokens * key_heads).reshape(tokens, key_heads)
            self._rows_of_heads[tokens, key_heads] = [paddle.to_tensor(rows) for rows in numbers.T]
        return self._rows_of_heads[tokens, key_heads]


def attention(
    q_BSHD: paddle.Tensor,
    k_BSKD: paddle.Tensor,
    v_BSKD: paddle.Tensor,
    plan: AttentionPlan,
    dropout: float = 0.0,
    key: Sequence[int] = (0,),
) -> paddle.Tensor:
    """Return softmax(q k^T / sqrt(D) + mask) v, [B, S, H, D].

    Args:
        dropout: probability with which attention probabilities are dropped.
        key: integers that seed the dropout (randomness.Randomness.key).
    """
    if plan.indices is not None:
        return _flashmask(q_BSHD, k_BSKD, v_BSKD, plan, dropout, key)
    if plan.mask is not None:
        return _dense_attention(q_BSHD, k_BSKD, v_BSKD, plan, dropout, key)
    if has_native_attention(q_BSHD, k_BSKD, v_BSKD):
        return native_attention(q_BSHD, k_BSKD, v_BSKD, plan.columns, dropout, key)
    return _BlockAttention.apply(q_BSHD, k_BSKD, v_BSKD, plan, dropout, tuple(key))


def _flashmask(q, k, v, plan, dropout, key):  # type: ignore[no-untyped-def]
    """Call Paddle's kernel. It takes bfloat16 or float16, so float32 tensors are rounded around the call."""
    dtype = q.dtype
    if dtype == paddle.float32:
        q, k, v = (x.astype("bfloat16") for x in (q, k, v))
    if dropout:
        paddle.seed(int(np.random.SeedSequence(list(key)).generate_state(1)[0]))
    out = F.flashmask_attention(q, k, v, plan.indices, dropout=dropout, causal=plan.causal)
    return out if out.dtype == dtype else out.astype(dtype)


def _dense_attention(q, k, v, plan, dropout, key):  # type: ignore[no-untyped-def]
    batch, length, heads, head_dim = q.shape
    key_heads = k.shape[2]
    group = heads // key_heads
    # [B, K, G, S, D] against [B, K, 1, S, D]: keys are broadcast, not repeated.
    q = (q * head_dim**-0.5).reshape([batch, length, key_heads, group, head_dim]).transpose([0, 2, 3, 1, 4])
    k, v = (x.transpose([0, 2, 1, 3]).unsqueeze(2) for x in (k, v))
    mask = _by_key_head(plan.mask, heads, key_heads)
    scores = paddle.matmul(q, k, transpose_y=True) + mask.astype(q.dtype)
    probabilities = F.softmax(scores)
    if plan.live_rows is not None:
        probabilities = probabilities * _by_key_head(plan.live_rows, heads, key_heads).astype(q.dtype)
    if dropout:
        probabilities = probabilities * MaskStream(key, dropout).next(probabilities.shape, q.dtype)
    return paddle.matmul(probabilities, v).transpose([0, 3, 1, 2, 4]).reshape([batch, length, heads, head_dim])


def _by_key_head(mask: paddle.Tensor, heads: int, key_heads: int) -> paddle.Tensor:
    """Reshape a mask [B, Hm, ...] to [B, 1 or K, 1 or G, ...]."""
    mask_heads, rest = mask.shape[1], mask.shape[2:]
    if mask_heads == heads:
        return mask.reshape([mask.shape[0], key_heads, heads // key_heads, *rest])
    return mask.unsqueeze(2)


def _exact_softmax_(scores: paddle.Tensor) -> paddle.Tensor:
    """Compute a softmax in place, with true zeros where Paddle's kernel leaves its floor (see SOFTMAX_FLOOR)."""
    return F.relu_(F.softmax_(scores).scale_(1.0, bias=-SOFTMAX_FLOOR))


class _BlockMask(NamedTuple):
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


def _block_mask(block: AttentionBlock, queries: int, keys: int, query_heads: int, key_heads: int) -> _BlockMask:
    group = query_heads // key_heads
    if block.causal:
        return _BlockMask(_causal_mask(queries, group), None)
    if block.masked is None:
        return _BlockMask(None, None)
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
    return _BlockMask(paddle.to_tensor(np.where(rows, np.float32(MASKED), np.float32(0))), live)


@lru_cache(maxsize=64)
def _causal_mask(tokens: int, group: int) -> paddle.Tensor:
    """Return the additive causal mask [tokens * group, tokens] of a tile against itself."""
    row = np.repeat(np.arange(tokens), group)[:, None]
    return paddle.to_tensor(np.where(np.arange(tokens) > row, np.float32(MASKED), np.float32(0)))


class _BlockAttention(PyLayer):
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

    def _blocks(self) -> Iterator[tuple[AttentionBlock, _BlockMask, _BlockRows]]:
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

"""Attention over documents: FlashMask on a GPU, an exact equivalent on a CPU, a dense mask on request.

The layout is Paddle's: queries [B, S, H, D], keys and values [B, S, K, D] with K dividing H (grouped-query
attention: query head h reads key head h // (H / K)). A query that sees no key yields exact zeros and no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from erniekit.model.attention_plan import Block, Blocks, masked_region, plan_blocks
from erniekit.model.autograd import given, needed
from erniekit.model.device import has_flashmask_kernel
from erniekit.model.randomness import MaskStream

MASKED = -1e30  # far below any score and still finite: a softmax over masked entries alone gives no NaN
SOFTMAX_FLOOR = 2e-28  # above e^-64, to which Paddle's softmax on a CPU raises smaller probabilities, masked ones too
KEEP_SCORES_UP_TO = 4 << 20  # attention probabilities kept for backward, numbers per layer; more are computed again


def dense_mask_bytes(batch: int, length: int, mask_heads: int = 1) -> int:
    """The size in bytes of the float32 mask that `AttentionPlan.build(..., dense=True)` allocates."""
    return 4 * batch * mask_heads * length * length


class AttentionPlan:
    """What one batch's attention has to compute; built once and shared by all layers.

    Exactly one of the three forms is present: `indices` (FlashMask's kernel), `blocks` (the CPU's), `mask` (dense).
    """

    def __init__(
        self,
        *,
        causal: bool,
        indices: paddle.Tensor | None = None,
        blocks: Blocks | None = None,
        mask: paddle.Tensor | None = None,
        live_rows: paddle.Tensor | None = None,
    ) -> None:
        self.causal, self.indices, self.blocks, self.mask, self.live_rows = causal, indices, blocks, mask, live_rows
        self._block_masks: dict[tuple[int, int], list[_BlockMask]] = {}
        self._row_orders: dict[tuple[int, int], _RowOrder] = {}

    @classmethod
    def build(cls, startend_row_indices: np.ndarray, causal: bool = True, dense: bool = False) -> AttentionPlan:
        """Plan the attention that FlashMask's int32 [B, Hm, S, n] describes (see `attention_plan`).

        dense: allocate a mask of `dense_mask_bytes(B, S, Hm)` instead and attend over the whole square.
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
            return cls(causal=causal, mask=mask, live_rows=paddle.to_tensor(~dead) if dead.any() else None)
        if has_flashmask_kernel():
            return cls(causal=causal, indices=paddle.to_tensor(indices))
        return cls(causal=causal, blocks=plan_blocks(indices, causal))

    def attend(
        self,
        q_BSHD: paddle.Tensor,
        k_BSKD: paddle.Tensor,
        v_BSKD: paddle.Tensor,
        *,
        layer: int = 0,
        dropout: float = 0.0,
        key: Sequence[int] = (0,),
    ) -> paddle.Tensor:
        """What a decoder layer calls; a key-value cache offers the same method (`layer` matters only there)."""
        del layer
        return attention(q_BSHD, k_BSKD, v_BSKD, self, dropout=dropout, key=key)

    def block_masks(self, query_heads: int, key_heads: int) -> list[_BlockMask]:
        """The additive mask of every block, in the order of `blocks`, for these numbers of heads."""
        assert self.blocks is not None
        heads = (query_heads, key_heads)
        if heads not in self._block_masks:
            lengths = self.blocks.tile_lengths
            self._block_masks[heads] = [
                _block_mask(block, lengths[block.query_tile], self.blocks.key_count(block), query_heads, key_heads)
                for block in self.blocks.blocks
            ]
        return self._block_masks[heads]

    def row_order(self, tokens: int, key_heads: int) -> _RowOrder:
        """How rows move between token order and head order."""
        if (tokens, key_heads) not in self._row_orders:
            numbers = np.arange(tokens * key_heads)
            self._row_orders[tokens, key_heads] = _RowOrder(
                heads_first=paddle.to_tensor(numbers.reshape(tokens, key_heads).T.ravel()),
                tokens_first=paddle.to_tensor(numbers.reshape(key_heads, tokens).T.ravel()),
            )
        return self._row_orders[tokens, key_heads]


def attention(
    q_BSHD: paddle.Tensor,
    k_BSKD: paddle.Tensor,
    v_BSKD: paddle.Tensor,
    plan: AttentionPlan,
    dropout: float = 0.0,
    key: Sequence[int] = (0,),
) -> paddle.Tensor:
    """softmax(q k^T / sqrt(D) + mask) v -> [B, S, H, D].

    Args:
        dropout: probability with which attention probabilities are dropped.
        key: integers that seed the dropout (randomness.Randomness.key).
    """
    if plan.indices is not None:
        return _flashmask(q_BSHD, k_BSKD, v_BSKD, plan, dropout, key)
    if plan.mask is not None:
        return _dense_attention(q_BSHD, k_BSKD, v_BSKD, plan, dropout, key)
    return _BlockAttention.apply(q_BSHD, k_BSKD, v_BSKD, plan, dropout, tuple(key))


def _flashmask(q, k, v, plan, dropout, key):  # type: ignore[no-untyped-def]
    """Paddle's kernel; it takes bfloat16 or float16, so float32 models are rounded around the call."""
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
    """A mask [B, Hm, ...] as [B, 1 or K, 1 or G, ...]."""
    mask_heads, rest = mask.shape[1], mask.shape[2:]
    if mask_heads == heads:
        return mask.reshape([mask.shape[0], key_heads, heads // key_heads, *rest])
    return mask.unsqueeze(2)


class _RowOrder(NamedTuple):
    """Row numbers, int64 [T * K]: `heads_first` gathers rows (t, k) into the order (k, t), `tokens_first` back."""

    heads_first: paddle.Tensor
    tokens_first: paddle.Tensor


def _exact_softmax_(scores: paddle.Tensor) -> paddle.Tensor:
    """Softmax in place, with true zeros where Paddle's kernel leaves its floor (see SOFTMAX_FLOOR)."""
    return F.relu_(F.softmax_(scores).scale_(1.0, bias=-SOFTMAX_FLOOR))


class _BlockMask(NamedTuple):
    """One block's additive mask [queries * G, keys], or with a leading axis K where key heads differ, and, if some
    queries are dead, their 0 / 1 rows. (A leading axis of 1 would make Paddle's addition 15 times slower.)"""

    additive: paddle.Tensor | None
    live_rows: paddle.Tensor | None


def _block_mask(block: Block, queries: int, keys: int, query_heads: int, key_heads: int) -> _BlockMask:
    group = query_heads // key_heads
    if block.causal:
        return _BlockMask(_causal_mask(queries, keys, group), None)
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
def _causal_mask(queries: int, keys: int, group: int) -> paddle.Tensor:
    """[queries * group, keys]; the last query is the last key's position."""
    row = np.repeat(np.arange(keys - queries, keys), group)[:, None]
    return paddle.to_tensor(np.where(np.arange(keys) > row, np.float32(MASKED), np.float32(0)))


class _BlockAttention(PyLayer):
    """Attention block by block, with its own backward pass.

    Heads lead: queries become [K, T * G, D] and keys [K, T, D] (T = B * S tokens, G = H / K), so that every tile of
    tokens is a range of rows, a group of query heads shares one product with its key head, and no key is repeated.
    With P the probabilities, M the dropout mask and O = (P * M) V, the gradients are
        dV = (P * M)^T dO,   dP = M * (dO V^T),   dS = P * (dP - rowsum(dO * O)),   dQ = dS K,   dK = dS^T Q,
    where rowsum(dO * O) equals rowsum(P * dP) (Dao et al., 2022, arXiv:2205.14135).
    """

    @staticmethod
    def forward(ctx, q, k, v, plan, dropout, key):  # type: ignore[no-untyped-def]
        work = _Work(plan, q, k.shape[2])
        q_tiles = work.query_tiles(q, scale=True)
        k_tiles, v_tiles = work.key_tiles(k), work.key_tiles(v)
        stream = MaskStream(key, dropout) if dropout else None
        ctx.wanted = needed(q, k, v)
        keep = any(ctx.wanted) and work.score_count() <= KEEP_SCORES_UP_TO
        out_tiles, kept = list[paddle.Tensor | None]([None] * len(q_tiles)), []
        for block, mask in work:
            probabilities = work.probabilities(block, mask, q_tiles, k_tiles)
            if keep:
                kept.append(probabilities)
            if stream:
                probabilities = probabilities * stream.next(probabilities.shape, probabilities.dtype)
            out_tiles[block.query_tile] = paddle.matmul(probabilities, _join(v_tiles, block))
        out = work.from_query_tiles(out_tiles)
        ctx.save_for_backward(q, k, v, out, *kept)  # all of them there, where recomputation can take them away
        ctx.work, ctx.dropout, ctx.key = work, dropout, key
        return out

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[no-untyped-def]
        q, k, v, out, *probabilities_kept = ctx.saved_tensor()
        work = ctx.work
        q_tiles = work.query_tiles(q, scale=True)
        k_tiles, v_tiles = work.key_tiles(k), work.key_tiles(v)
        grad_tiles = work.query_tiles(grad_out)
        row_sums = work.row_sums(grad_out, out)
        stream = MaskStream(ctx.key, ctx.dropout) if ctx.dropout else None
        kept = iter(probabilities_kept)
        dq_tiles = list[paddle.Tensor | None]([None] * len(q_tiles))
        dk_tiles = list[paddle.Tensor | None]([None] * len(k_tiles))
        dv_tiles = list[paddle.Tensor | None]([None] * len(k_tiles))
        for block, mask in work:
            probabilities = next(kept, None)
            if probabilities is None:
                probabilities = work.probabilities(block, mask, q_tiles, k_tiles)
            grad, row_sum = grad_tiles[block.query_tile], row_sums[block.query_tile]
            d_scores = paddle.matmul(grad, _join(v_tiles, block), transpose_y=True)
            dropped = probabilities
            if stream:
                dropout_mask = stream.next(probabilities.shape, probabilities.dtype)
                dropped = probabilities * dropout_mask
                d_scores = d_scores.multiply_(dropout_mask)
            work.accumulate(dv_tiles, block, paddle.matmul(dropped, grad, transpose_x=True))
            d_scores = d_scores.subtract_(row_sum).multiply_(probabilities)
            dq_tiles[block.query_tile] = paddle.matmul(d_scores, _join(k_tiles, block))
            work.accumulate(dk_tiles, block, paddle.matmul(d_scores, q_tiles[block.query_tile], transpose_x=True))
        gradients = (
            work.from_query_tiles(dq_tiles, scale=True),
            work.from_key_tiles(dk_tiles),
            work.from_key_tiles(dv_tiles),
        )
        return given(gradients, ctx.wanted)


class _Work:
    """The blocks of a plan for given numbers of heads, and the moves between [B, S, N, D] and lists of tiles."""

    def __init__(self, plan: AttentionPlan, q_BSHD: paddle.Tensor, key_heads: int) -> None:
        assert plan.blocks is not None
        self.batch, self.length, self.query_heads, self.head_dim = q_BSHD.shape
        self.dtype = q_BSHD.dtype
        self.key_heads, self.group = key_heads, self.query_heads // key_heads
        self.blocks = plan.blocks
        self.lengths = plan.blocks.tile_lengths
        self.masks = plan.block_masks(self.query_heads, key_heads)
        self.rows = plan.row_order(self.batch * self.length, key_heads)
        if sum(self.lengths) != self.batch * self.length:
            raise ValueError(f"the plan covers {sum(self.lengths)} tokens, the queries {self.batch * self.length}")

    def __iter__(self):  # type: ignore[no-untyped-def]
        return zip(self.blocks.blocks, self.masks, strict=True)

    def score_count(self) -> int:
        return self.query_heads * self.blocks.score_count()

    def query_tiles(self, x: paddle.Tensor, scale: bool = False) -> list[paddle.Tensor]:
        """[B, S, H, D] -> per tile [K, tokens * G, D], divided by sqrt(D) if asked."""
        by_head = self._heads_first(x).reshape([self.key_heads, -1, self.head_dim])
        if scale:
            by_head = by_head * self.head_dim**-0.5
        return _split(by_head, [length * self.group for length in self.lengths])

    def key_tiles(self, x: paddle.Tensor) -> list[paddle.Tensor]:
        """[B, S, K, D] -> per tile [K, tokens, D]."""
        return _split(self._heads_first(x), self.lengths)

    def row_sums(self, a: paddle.Tensor, b: paddle.Tensor) -> list[paddle.Tensor]:
        """sum over D of a * b -> per tile [K, tokens * G, 1]."""
        ones = paddle.ones([self.head_dim, 1], dtype=a.dtype)
        sums = paddle.matmul((a * b).reshape([-1, self.head_dim]), ones).reshape([-1, self.key_heads, self.group])
        by_head = sums.transpose([1, 0, 2]).reshape([self.key_heads, -1, 1])
        return _split(by_head, [length * self.group for length in self.lengths])

    def probabilities(self, block, mask, q_tiles, k_tiles):  # type: ignore[no-untyped-def]
        """softmax of one block's scores, [K, queries * G, keys]; exact zeros in rows that see nothing."""
        scores = paddle.matmul(q_tiles[block.query_tile], _join(k_tiles, block), transpose_y=True)
        if mask.additive is not None:
            scores = scores.add_(mask.additive.astype(scores.dtype))
        probabilities = _exact_softmax_(scores)
        if mask.live_rows is None:
            return probabilities
        return probabilities.multiply_(mask.live_rows.astype(scores.dtype))

    def from_query_tiles(self, tiles: list[paddle.Tensor | None], scale: bool = False) -> paddle.Tensor:
        by_head = self._concat(tiles, self.group)
        if scale:
            by_head = by_head.scale_(self.head_dim**-0.5)
        return self._tokens_first(by_head.reshape([self.key_heads, -1, self.group * self.head_dim]), self.query_heads)

    def from_key_tiles(self, tiles: list[paddle.Tensor | None]) -> paddle.Tensor:
        return self._tokens_first(self._concat(tiles, 1), self.key_heads)

    def accumulate(self, sums: list[paddle.Tensor | None], block: Block, values: paddle.Tensor) -> None:
        """Add a block's gradient of its keys or values [K, keys, D] to the tiles that the keys lie in."""
        tiles = range(block.first_key_tile, block.end_key_tile)
        for tile, part in zip(tiles, _split(values, [self.lengths[tile] for tile in tiles]), strict=True):
            total = sums[tile]
            sums[tile] = part if total is None else total.add_(part)

    def _concat(self, tiles: list[paddle.Tensor | None], rows_per_token: int) -> paddle.Tensor:
        present = [
            paddle.zeros([self.key_heads, length * rows_per_token, self.head_dim], self.dtype) if tile is None else tile
            for tile, length in zip(tiles, self.lengths, strict=True)
        ]
        return present[0] if len(present) == 1 else paddle.concat(present, axis=1)

    def _heads_first(self, x: paddle.Tensor) -> paddle.Tensor:
        """[B, S, K * r, D] -> [K, T, r * D], by gathering rows: a transpose is 5 times slower."""
        tokens = self.batch * self.length
        rows = paddle.gather(x.reshape([tokens * self.key_heads, -1]), self.rows.heads_first)
        return rows.reshape([self.key_heads, tokens, -1])

    def _tokens_first(self, x: paddle.Tensor, heads: int) -> paddle.Tensor:
        rows = paddle.gather(x.reshape([self.key_heads * self.batch * self.length, -1]), self.rows.tokens_first)
        return rows.reshape([self.batch, self.length, heads, self.head_dim])


def _split(x: paddle.Tensor, lengths: Sequence[int]) -> list[paddle.Tensor]:
    return [x] if len(lengths) == 1 else paddle.split(x, list(lengths), axis=1)


def _join(tiles: list[paddle.Tensor], block: Block) -> paddle.Tensor:
    """The keys or values of a block."""
    chosen = tiles[block.first_key_tile : block.end_key_tile]
    return chosen[0] if len(chosen) == 1 else paddle.concat(chosen, axis=1)

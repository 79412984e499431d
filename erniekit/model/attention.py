"""Attention over documents: FlashMask on a GPU, an exact equivalent on a CPU, a dense mask on request.

The layout is Paddle's: queries [B, S, H, D], keys and values [B, S, K, D], where K divides H (grouped-query attention:
query head h reads key head h // (H / K)). A query that sees no key yields exact zeros and no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle
import paddle.nn.functional as F

from erniekit.model.attention_plan import MASKED, BlockPlan, masked_region, plan_blocks
from erniekit.model.attention_sinks import with_sink_key
from erniekit.model.block_attention import BlockAttention, BlockMask, block_mask
from erniekit.model.column_plan import ColumnPlan, plan_columns
from erniekit.model.device import has_flashmask_kernel
from erniekit.model.native_attention import has_native_attention, native_attention
from erniekit.model.randomness import MaskStream


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
        self._block_masks: dict[tuple[int, int], list[BlockMask]] = {}
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

        Positions are those of the row. What several answers share must therefore be within the window of all of them:
        two ranges of queries that see a column cannot be written as indices.
        """
        if window not in self._windowed:
            indices = self._startend_row_indices
            assert indices is not None and self.causal and indices.shape[-1] == 1, "windows are of causal documents"
            columns = np.arange(indices.shape[2], dtype=np.int32)[None, None, :, None]
            narrowed = np.minimum(indices, columns + np.int32(window))
            first_end_behind = np.minimum.accumulate(indices[:, :, ::-1], axis=2)[:, :, ::-1]
            shared = first_end_behind < indices  # columns behind which an answer ends that does not end their document
            assert not (shared & (narrowed < indices)).any(), "answers share a prompt that is longer than the window"
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

    def block_masks(self, query_heads: int, key_heads: int) -> list[BlockMask]:
        """Return the additive mask of every block, in the order of `blocks`, for these numbers of heads."""
        heads = (query_heads, key_heads)
        if heads not in self._block_masks:
            lengths = self.blocks.tile_lengths
            self._block_masks[heads] = [
                block_mask(block, lengths[block.query_tile], self.blocks.key_count(block), query_heads, key_heads)
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
    return BlockAttention.apply(q_BSHD, k_BSKD, v_BSKD, plan, dropout, tuple(key))


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

"""Attention over key-value blocks (PagedAttention: Kwon et al., 2023, arXiv:2309.06180), with Paddle's operators.

Shapes: T tokens of a step, H query heads, K key heads, G = H / K query heads of each, D head size, L slots that are
attended to, N answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F

from erniekit.inference.decoding.step import BLOCK_TOKENS, StepBatch
from erniekit.model.attention import AttentionPlan
from erniekit.model.attention_plan import MASKED
from erniekit.model.threads import parallel_map

QUERY_TILE = 128  # tokens of a prompt that attend to the cache together: bounds the memory of their scores


def length_classes(cached: np.ndarray) -> np.ndarray:
    """Return a number for each length, which is the same for lengths that may share a product: those up to twice as
    long as the shortest."""
    return np.frexp(cached // BLOCK_TOKENS)[1]


class KeyValueBlocks:
    """The keys and values of all layers, in memory that grows with the largest block number.

    Those of a layer are [K * count, BLOCK_TOKENS * D], where the blocks of a key head lie next to each other: so a
    sequence's keys are gathered as [K, L, D], as products want them, in whole blocks.

    Args:
        limit: there will be no more blocks.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0  # of blocks
        self._layers: dict[tuple[int, str], paddle.Tensor] = {}

    def grow(self, count: int) -> None:
        """Have memory for at least so many blocks."""
        if count > self.count:
            self.count = max(count, min(2 * self.count, self._limit))

    def write(
        self, layer: int, kind: str, slots: paddle.Tensor, new_KTD: paddle.Tensor, begun: paddle.Tensor | None
    ) -> paddle.Tensor:
        """Put keys or values of a layer into slots, int64 [K * T] among those of all key heads; return its blocks.

        Args:
            begun: the blocks that get their first token, int64 [K * blocks]; None: there are none. Their other slots
                become zero: products read whole blocks, and what is masked must be finite.
        """
        blocks = self._of_layer((layer, kind), new_KTD)
        size = new_KTD.shape[-1]
        if begun is not None:
            paddle.scatter_(blocks, begun, paddle.zeros([len(begun), blocks.shape[1]], blocks.dtype))
        paddle.scatter_(blocks.view([-1, size]), slots, new_KTD.reshape([-1, size]))
        return blocks

    def _of_layer(self, name: tuple[int, str], like_KTD: paddle.Tensor) -> paddle.Tensor:
        heads, _, size = like_KTD.shape
        held = self._layers[name].shape[0] // heads if name in self._layers else 0
        if held < self.count:
            blocks = paddle.zeros([heads, self.count - held, BLOCK_TOKENS * size], like_KTD.dtype)
            if held:
                blocks = paddle.concat([self._layers[name].reshape([heads, held, -1]), blocks], axis=1)
            self._layers[name] = blocks.reshape([heads * self.count, -1])
        return self._layers[name]


class CacheAttention:
    """The attention of one step, for all layers; replaces an `AttentionPlan`.

    The batch has the newest tokens of answers first, by `length_classes`; then chunks that continue prompts; then those
    that begin one.
    """

    def __init__(self, blocks: KeyValueBlocks, batch: StepBatch) -> None:
        blocks.grow(int(batch.block_tables.max()) + 1)
        self._blocks, self._tables, self._cached = blocks, batch.block_tables.astype(np.int64), batch.cached
        counts = np.diff(batch.starts)
        own = self._tables[np.repeat(np.arange(len(counts)), counts), batch.positions // BLOCK_TOKENS]
        self._slots = own * BLOCK_TOKENS + batch.positions % BLOCK_TOKENS
        self._begun = own[batch.positions % BLOCK_TOKENS == 0]
        answers = int(np.count_nonzero((batch.cached > 0) & (counts == 1)))
        old = int(np.count_nonzero(batch.cached))
        self._answers = _runs(length_classes(batch.cached[:answers]))
        self._chunks = [(number, slice(*batch.starts[number : number + 2].tolist())) for number in range(answers, old)]
        self._new = slice(int(batch.starts[old]), len(batch.token_ids))
        self._plan: AttentionPlan | None = None
        if old < len(counts):
            ends = np.repeat(batch.starts[old + 1 :] - batch.starts[old], counts[old:])
            self._plan = AttentionPlan.build(ends[None, None, :, None])
        self._shared: dict[Any, Any] = {}  # what several layers use

    def attend(
        self,
        q_BSHD: paddle.Tensor,
        k_BSKD: paddle.Tensor,
        v_BSKD: paddle.Tensor,
        *,
        layer: int,
        dropout: float,
        key: Sequence[int],
        window: int | None = None,
        sinks_H: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        """Keep keys and values; attend from each token to those of its sequence up to its own."""
        assert dropout == 0.0, "text is generated in evaluation mode"
        heads = k_BSKD.shape[2]
        slots = self._once(("slots", heads), lambda: self._indices(heads, BLOCK_TOKENS, self._slots))
        begun = None
        if len(self._begun):
            begun = self._once(("begun", heads), lambda: self._indices(heads, 1, self._begun))
        keys, values = (
            self._blocks.write(layer, kind, slots, new[0].transpose([1, 0, 2]), begun)
            for kind, new in (("keys", k_BSKD), ("values", v_BSKD))
        )
        cached = (keys, values, heads, window, sinks_H)
        parts = [self._attend_answers(q_BSHD[0, rows], rows, *cached) for rows in self._answers]
        parts += [self._attend_chunk(q_BSHD[0, rows], number, *cached) for number, rows in self._chunks]
        if self._plan is not None:
            new = [x[:, self._new] if self._new.start else x for x in (q_BSHD, k_BSKD, v_BSKD)]
            parts.append(self._plan.attend(*new, window=window, sinks_H=sinks_H)[0])
        return (parts[0] if len(parts) == 1 else paddle.concat(parts)).unsqueeze(0)

    def _attend_answers(self, q_NHD, rows, keys, values, heads, window, sinks_H):  # type: ignore[no-untyped-def]
        """Attend from the newest token of each of some answers."""
        answers, query_heads, size = q_NHD.shape
        group = query_heads // heads
        index, masked_NL = self._once(("answers", rows.start, heads, window), lambda: self._seen(rows, heads, window))
        keys, values = (paddle.gather(x, index).reshape([heads, answers, -1, size]) for x in (keys, values))
        q = (q_NHD * size**-0.5).reshape([answers, heads, group, size]).transpose([1, 0, 2, 3])
        scores = paddle.matmul(q, keys, transpose_y=True)
        if masked_NL.any():
            # Of the scores' full shape, because Paddle's broadcasting sum is 30 times slower on a CPU.
            mask = self._once(("mask", rows.start, heads, window), lambda: _mask(masked_NL[None, :, None], scores))
            scores = scores + mask
        if sinks_H is not None:
            sinks = sinks_H.astype(scores.dtype).reshape([heads, 1, group, 1]).expand([-1, answers, -1, -1])
            scores = paddle.concat([scores, sinks], axis=-1)
        probabilities = F.softmax(scores)
        if sinks_H is not None:
            probabilities = probabilities[..., :-1]
        out = paddle.matmul(probabilities, values)
        return out.transpose([1, 0, 2, 3]).reshape([answers, query_heads, size])

    def _attend_chunk(self, q_THD, number, keys, values, heads, window, sinks_H):  # type: ignore[no-untyped-def]
        """Attend from tokens that continue the prompt of a sequence; key heads are computed concurrently."""
        tokens, query_heads, size = q_THD.shape
        group, first = query_heads // heads, int(self._cached[number])
        first_block = 0 if window is None else max(0, first - window + 1) // BLOCK_TOKENS
        end_block = -(-(first + tokens) // BLOCK_TOKENS)

        def index_of_blocks() -> paddle.Tensor:
            return self._indices(heads, 1, self._tables[number, first_block:end_block])

        index = self._once(("chunk", number, heads, window), index_of_blocks)
        keys, values = (paddle.gather(x, index).reshape([heads, -1, size]) for x in (keys, values))
        q = (q_THD * size**-0.5).reshape([tokens, heads, group, size]).transpose([1, 0, 2, 3])
        sinks = None if sinks_H is None else sinks_H.astype(q.dtype).reshape([heads, 1, group, 1])
        tiles = [range(start, min(start + QUERY_TILE, tokens)) for start in range(0, tokens, QUERY_TILE)]

        def attend(head: int) -> paddle.Tensor:
            outputs = []
            for tile in tiles:
                start = 0 if window is None else max(0, first + tile.start - window + 1) - first_block * BLOCK_TOKENS
                stop = first + tile.stop - first_block * BLOCK_TOKENS
                unmasked = stop - len(tile) if window is None else start  # keys from here on may be masked
                own = q[head, tile.start : tile.stop].reshape([-1, size])
                scores = paddle.matmul(own, keys[head, unmasked:stop], transpose_y=True)
                scores = scores + self._tile_mask(len(tile), stop - unmasked, window, group).astype(scores.dtype)
                if unmasked > start:
                    before = paddle.matmul(own, keys[head, start:unmasked], transpose_y=True)
                    scores = paddle.concat([before, scores], axis=1)
                if sinks is not None:
                    column = sinks[head].expand([len(tile), group, 1]).reshape([-1, 1])
                    scores = paddle.concat([scores, column], axis=1)
                probabilities = F.softmax(scores)[:, : stop - start]
                outputs.append(paddle.matmul(probabilities, values[head, start:stop]))
            return paddle.concat(outputs)

        out = paddle.stack(parallel_map(attend, range(heads)))
        return out.reshape([heads, tokens, group, size]).transpose([1, 0, 2, 3]).reshape(q_THD.shape)

    def _seen(self, rows: slice, heads: int, window: int | None) -> tuple[paddle.Tensor, np.ndarray]:
        """Return the indices of the blocks that answers see, and bool [N, L]: which slots in them they do not."""
        newest = self._cached[rows].astype(np.int64)
        oldest = np.zeros_like(newest) if window is None else np.maximum(0, newest - window + 1)
        first, last = oldest // BLOCK_TOKENS, newest // BLOCK_TOKENS
        numbers = first[:, None] + np.arange((last - first).max() + 1)
        blocks = np.take_along_axis(self._tables[rows], np.minimum(numbers, last[:, None]), axis=1)
        slots = (first * BLOCK_TOKENS)[:, None] + np.arange(numbers.shape[1] * BLOCK_TOKENS)
        masked = (slots > newest[:, None]) | (slots < oldest[:, None])
        return self._indices(heads, 1, blocks), masked

    def _tile_mask(self, tokens: int, keys: int, window: int | None, group: int) -> paddle.Tensor:
        """Return the additive mask [tokens * G, keys] of tokens of which the last one is the last key's."""

        def make() -> paddle.Tensor:
            ages = np.arange(keys - tokens, keys)[:, None] - np.arange(keys)
            masked = (ages < 0) if window is None else (ages < 0) | (ages >= window)
            return paddle.to_tensor(np.repeat(np.where(masked, np.float32(MASKED), np.float32(0)), group, axis=0))

        return self._once(("tile", tokens, keys, window, group), make)

    def _indices(self, heads: int, step: int, of_head: np.ndarray) -> paddle.Tensor:
        """Return indices among those of all key heads, int64 [K * size]; each head has `step` for every block."""
        starts = np.arange(heads)[:, None] * (self._blocks.count * step)
        return paddle.to_tensor((starts + of_head.reshape(1, -1)).reshape(-1))

    def _once(self, name: Any, make: Callable[[], Any]) -> Any:
        if name not in self._shared:
            self._shared[name] = make()
        return self._shared[name]


def _runs(values: np.ndarray) -> list[slice]:
    """Return the ranges of equal neighbours."""
    borders = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return [slice(start, stop) for start, stop in pairwise(borders) if stop > start]


def _mask(masked: np.ndarray, like: paddle.Tensor) -> paddle.Tensor:
    """Return the additive mask of scores in their full shape."""
    additive = np.where(masked, np.float32(MASKED), np.float32(0))
    return paddle.to_tensor(np.broadcast_to(additive, like.shape)).astype(like.dtype)

"""One step of decoding with the model's own layers: for every family, device and layout of ranks.

The tokens of all sequences are one row [1, T] of the decoder, without padding. Only attention tells sequences apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import paddle

from erniekit.inference.decoding.cache_attention import CacheAttention, KeyValueBlocks, length_classes
from erniekit.inference.decoding.step import StepBatch
from erniekit.model.bf16 import float32_products


class DecoderStep:
    """Computes steps with a decoder, or with a pipeline of its stages; all ranks compute the same steps together.

    Args:
        blocks: the most key-value blocks that are given out.
        use: lets the decoder have a set of adapters (`StepBatch.adapters`).
    """

    def __init__(self, decoder: Any, blocks: int, use: Callable[[str], None] = lambda name: None) -> None:
        self._decoder, self._blocks, self._use = decoder, KeyValueBlocks(blocks), use

    def logits(self, batch: StepBatch) -> np.ndarray:
        """See `Step`. Dropout is off, and products on a CPU are in float32; the decoder's mode stays as it is."""
        self._use(batch.adapters)
        logits = self._together(batch)
        # Prompts that begin are one row of attention, where NaN times a probability of zero is NaN. A row of NaN has it
        # everywhere; a row of a model that writes codes has no logits of text.
        if len(batch.cached) > 1 and not np.isfinite(logits[:, [0, -1]]).any(axis=1).all():
            return np.concatenate([self._together(_alone(batch, number)) for number in range(len(batch.cached))])
        return logits

    @paddle.no_grad()
    def _together(self, batch: StepBatch) -> np.ndarray:
        decoder, training = self._decoder, self._decoder.training
        batch = _grouped(batch)
        cache = CacheAttention(self._blocks, batch)
        inputs = {name: paddle.to_tensor(values) for name, values in batch.inputs.items()}
        if training:
            decoder.eval()
        try:
            with decoder.tp.no_sequence_parallel(), float32_products():
                turned = batch.positions if batch.rotary is None else batch.rotary
                ids, positions = (paddle.to_tensor(values[None]) for values in (batch.token_ids, turned))
                hidden = decoder(ids, positions, cache, **inputs)
                if not len(batch.wanted):
                    return np.zeros((0, decoder.config.vocab_size), np.float32)
                rows = paddle.gather(hidden.reshape([-1, hidden.shape[-1]]), paddle.to_tensor(batch.wanted))
                return decoder.head(rows).astype("float32").numpy()
        finally:
            if training:
                decoder.train()


def _alone(batch: StepBatch, number: int) -> StepBatch:
    """Return the part of a batch that is of one sequence."""
    start, stop = batch.starts[number : number + 2]
    return replace(
        batch,
        token_ids=batch.token_ids[start:stop],
        positions=batch.positions[start:stop],
        rotary=None if batch.rotary is None else batch.rotary[start:stop],
        starts=np.array([0, stop - start], np.int32),
        cached=batch.cached[number : number + 1],
        block_tables=batch.block_tables[number : number + 1],
        wanted=batch.wanted[(batch.wanted >= start) & (batch.wanted < stop)] - start,
    )


def _grouped(batch: StepBatch) -> StepBatch:
    """Return the batch in the order of `CacheAttention`, where logits stay in the order in which they are wanted."""
    counts = np.diff(batch.starts)
    is_answer = (batch.cached > 0) & (counts == 1)
    classes = np.where(is_answer, length_classes(batch.cached), 0)
    order = np.lexsort((classes, ~is_answer, batch.cached == 0))  # the last key comes first
    if (order == np.arange(len(order))).all():
        return batch
    assert not batch.inputs, "further arrays come with one sequence"
    tokens = np.concatenate([np.arange(batch.starts[number], batch.starts[number + 1]) for number in order])
    places = np.empty_like(tokens)
    places[tokens] = np.arange(len(tokens))
    return replace(
        batch,
        token_ids=batch.token_ids[tokens],
        positions=batch.positions[tokens],
        rotary=None if batch.rotary is None else batch.rotary[tokens],
        starts=np.concatenate([[0], np.cumsum(counts[order])]).astype(np.int32),
        cached=batch.cached[order],
        block_tables=batch.block_tables[order],
        wanted=places[batch.wanted],
    )

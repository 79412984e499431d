"""Dropout masks that depend only on their position in the run.

Every draw is seeded from (seed, step, micro-batch, layer, site). Micro-batches are numbered over all data-parallel
ranks, so that several ranks draw the same as one process. Nothing needs to be stored to resume a run, a recomputed
layer draws the same mask again, and results do not depend on earlier steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import paddle


class Site(IntEnum):
    """Where in a decoder layer a mask is drawn."""

    ATTENTION_PROBABILITIES = 0
    ATTENTION_OUTPUT = 1
    MLP_OUTPUT = 2
    ADAPTER_INPUT = 3  # the key's layer is then a hash of the linear layer's path


class Randomness:
    """The position in the run; the training loop calls `set` before every micro-batch.

    `dropout_scale` multiplies every dropout probability (warm-up). The position must not change between the forward and
    the backward pass of a micro-batch, because recomputation draws masks again.

    Args:
        dp_rank, dp_world_size: this rank among the data-parallel ranks that take the micro-batches of a step in turn.
    """

    def __init__(self, seed: int, dp_rank: int = 0, dp_world_size: int = 1) -> None:
        self.seed, self._dp_rank, self._dp_world_size = seed, dp_rank, dp_world_size
        self.step, self.micro_batch, self.dropout_scale = 0, 0, 1.0

    def set(self, *, step: int, micro_batch: int, dropout_scale: float = 1.0) -> None:
        self.step, self.dropout_scale = step, dropout_scale
        self.micro_batch = micro_batch * self._dp_world_size + self._dp_rank

    def key(self, layer: int, site: Site, shard: int = 0) -> tuple[int, ...]:
        """Return the key of a mask.

        Args:
            shard: index of this rank's shard of the values, if a tensor-parallel group shards them.
        """
        entropy = (self.seed, self.step, self.micro_batch, layer, int(site), 0)  # 0 was once a rank
        return (*entropy, shard) if shard else entropy


class MaskStream:
    """Successive dropout masks of one site. Two streams with the same key give the same masks in the same order."""

    def __init__(self, key: Sequence[int], probability: float) -> None:
        self._bits = np.random.SFC64(np.random.SeedSequence(list(key)))
        # 16 random bits decide each entry; the scale uses the probability that 16 bits can express.
        self._dropped = round(probability * 65536)
        self._scale = np.float32(65536 / (65536 - self._dropped))

    def next(self, shape: Sequence[int], dtype: paddle.dtype = paddle.float32) -> paddle.Tensor:
        """Return a mask of the given shape, 0 (dropped) or 1 / (1 - p) (kept)."""
        size = int(np.prod(shape))
        words = self._bits.random_raw((size + 3) // 4).view(np.uint16)[:size]
        kept = (words >= self._dropped).reshape(shape)
        return paddle.to_tensor(kept * self._scale).astype(dtype)


def dropout(x: paddle.Tensor, probability: float, key: Sequence[int]) -> paddle.Tensor:
    """Drop entries of x with the given probability and scale the others by 1 / (1 - p)."""
    if probability == 0.0:
        return x
    if not x.place.is_cpu_place():
        # Drawing on the host would cost a transfer per site, so the device's generator is seeded for each draw.
        paddle.seed(int(np.random.SeedSequence(list(key)).generate_state(1)[0]))
        return paddle.nn.functional.dropout(x, p=probability, training=True)
    return x * MaskStream(key, probability).next(x.shape, x.dtype)

"""Tensor parallelism: this rank's shard of every large matrix, and the collectives of a tensor-parallel group.

Megatron-LM: Shoeybi et al., 2019, arXiv:1909.08053; with sequence parallelism: Korthikanti et al., 2022,
arXiv:2205.05198. A block of the model runs `copy_to_tp` before the column-parallel matrices, whose outputs are sharded,
and `reduce_from_tp` after the row-parallel ones, whose inputs are sharded:

    y = reduce_from_tp(row_parallel(f(column_parallel(copy_to_tp(x)))))

Outside of a block, every rank has the same hidden states; with sequence parallelism, each has those of its T / n
tokens, as [1, T / n, H]. Inside, every rank has all tokens and its shard of the channels or heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle.distributed as dist
from paddle import Tensor
from paddle.distributed.fleet.layers.mpu import mp_ops
from paddle.distributed.fleet.utils.sequence_parallel_utils import AllGatherOp, ReduceScatterOp


class _SequenceParallelSwitch:
    """A switch that all layers of a model share."""

    off = False


@dataclass(frozen=True)
class TensorParallel:
    """One rank of a tensor-parallel group; `NO_TENSOR_PARALLEL` is the group of one, whose methods return their input.

    The collectives are fleet's, each with its gradient; those of sequence parallelism use fleet's tensor-parallel
    group.

    Attributes:
        rank, size: this rank's index in the group, and the size of the group.
        group: fleet's tensor-parallel group.
        sequence_parallel: whether hidden states outside of blocks are sharded along the sequence.
        skip_c_identity: do not copy the inputs and outputs of a block (`enable_mp_skip_c_identity`).
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    sequence_parallel: bool = False
    skip_c_identity: bool = False
    _sequence_switch: _SequenceParallelSwitch = field(default_factory=lambda: _SequenceParallelSwitch())

    @property
    def sequence_parallel_active(self) -> bool:
        """Whether hidden states outside of blocks are currently sharded along the sequence."""
        return self.size > 1 and self.sequence_parallel and not self._sequence_switch.off

    @contextmanager
    def no_sequence_parallel(self) -> Iterator[None]:
        """Inside, every rank has the hidden states of all tokens, as generation of one token at a time needs. It
        affects every layer that got this object, or one made from it by `replace`."""
        self._sequence_switch.off = True
        try:
            yield
        finally:
            self._sequence_switch.off = False

    def local_size(self, length: int) -> int:
        """Return the length of a shard of an axis; the runner has checked that the axis can be sharded evenly."""
        assert length % self.size == 0
        return length // self.size

    def local_shard(self, values: np.ndarray, axis: int | None) -> np.ndarray:
        """Return this rank's shard of an array along an axis; the full array if the axis is None."""
        if axis is None or self.size == 1:
            return values
        width = self.local_size(values.shape[axis])
        return values.take(range(self.rank * width, (self.rank + 1) * width), axis)

    def all_gather(self, values: Tensor, axis: int | None) -> np.ndarray:
        """Concatenate the ranks' shards along an axis."""
        if axis is None or self.size == 1:
            return values.numpy()
        slices: list[Tensor] = []
        dist.all_gather(slices, values.contiguous(), group=self.group)
        return np.concatenate([part.numpy() for part in slices], axis)

    def copy_to_tp(self, x: Tensor) -> Tensor:
        """Prepare hidden states for a block: [..., H] unchanged, or all tokens, [1, T, H]; gradients of all ranks are
        summed."""
        if self.size == 1:
            return x
        if not self.sequence_parallel_active:
            return mp_ops._c_identity(x, self.group, self.skip_c_identity)
        return AllGatherOp.apply(_rows(x)).unsqueeze(0)

    def reduce_from_tp(self, x: Tensor) -> Tensor:
        """Sum a block's outputs over the ranks: [..., H] on every rank, or its tokens' [1, T / n, H]."""
        if self.size == 1:
            return x
        if not self.sequence_parallel_active:
            return mp_ops._mp_allreduce(x, group=self.group, skip_c_identity_dynamic=self.skip_c_identity)
        return ReduceScatterOp.apply(_rows(x)).unsqueeze(0)

    def sum_shards(self, x: Tensor) -> Tensor:
        """Sum over the ranks what each goes on to use for its own shard, so that their gradients are summed, too."""
        if self.size == 1:
            return x
        return mp_ops._c_identity(mp_ops._mp_allreduce(x, group=self.group), self.group)

    def add_parts(self, x: Tensor) -> Tensor:
        """Sum over the ranks what all go on to use alike; the gradient of each part is that of the sum."""
        return x if self.size == 1 else mp_ops._mp_allreduce(x, group=self.group)

    def gather_from_tp(self, x: Tensor) -> Tensor:
        """Concatenate all ranks' shards of the last axis; the gradient is this rank's shard."""
        return x if self.size == 1 else mp_ops._c_concat(x, group=self.group)

    def local_tokens(self, x_BS: Tensor) -> Tensor:
        """Return the values [1, T / n] of the tokens that this rank has outside of blocks; x itself if it has all."""
        if not self.sequence_parallel_active:
            return x_BS
        flat = x_BS.reshape([1, -1])
        width = self.local_size(flat.shape[1])
        return flat[:, self.rank * width : (self.rank + 1) * width]

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the group, without a gradient."""
        return self._reduced(x, dist.ReduceOp.SUM)

    def maximum(self, x: Tensor) -> Tensor:
        """Take the maximum over the group, without a gradient."""
        return self._reduced(x, dist.ReduceOp.MAX)

    def minimum(self, x: Tensor) -> Tensor:
        """Take the minimum over the group, without a gradient."""
        return self._reduced(x, dist.ReduceOp.MIN)

    def _reduced(self, x: Tensor, op: Any) -> Tensor:
        if self.size == 1:
            return x
        total = x.clone()
        dist.all_reduce(total, op=op, group=self.group)
        return total


NO_TENSOR_PARALLEL = TensorParallel()


def _rows(x: Tensor) -> Tensor:
    return x.reshape([-1, x.shape[-1]])

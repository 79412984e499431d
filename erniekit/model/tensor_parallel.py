"""This rank's share of every large matrix, and what the ranks of a tensor-parallel group exchange (Megatron-LM:
Shoeybi et al., 2019, arXiv:1909.08053; with the sequence divided: Korthikanti et al., 2022, arXiv:2205.05198).

A block of the model is entered before the matrices whose outputs are cut, and left after those whose inputs are cut:

    y = leave(row_cut(f(column_cut(enter(x)))))

Outside, every rank has the same hidden states; with the sequence divided, each has those of its own T / n tokens, as
[1, T / n, H]. Inside, every rank has all tokens and its slice of the channels or heads.
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
    """One rank of a tensor-parallel group; `NO_TENSOR_PARALLEL` is the group of one, whose every method returns what
    it is given.

    The exchanges are fleet's, each with its gradient; those of tokens use fleet's own tensor-parallel group.

    Attributes:
        rank, size: this rank's number in the group, and how many there are.
        group: fleet's tensor-parallel group.
        sequence_parallel: whether hidden states are divided along the sequence outside of blocks.
        skip_c_identity: what enters and leaves a block is not copied (`enable_mp_skip_c_identity`).
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    sequence_parallel: bool = False
    skip_c_identity: bool = False
    _sequence_switch: _SequenceParallelSwitch = field(default_factory=lambda: _SequenceParallelSwitch())

    @property
    def sequence_parallel_active(self) -> bool:
        """Whether hidden states outside of blocks are of this rank's tokens, at this moment."""
        return self.size > 1 and self.sequence_parallel and not self._sequence_switch.off

    @contextmanager
    def no_sequence_parallel(self) -> Iterator[None]:
        """Inside, every rank has the hidden states of all tokens, as without sequence parallelism: answers are written
        one token at a time. Holds for every layer that was given this slice, or one made from it by `replace`."""
        self._sequence_switch.off = True
        try:
            yield
        finally:
            self._sequence_switch.off = False

    def local_size(self, length: int) -> int:
        """The length of a slice of an axis; the axis can be divided, which the runner has checked."""
        assert length % self.size == 0
        return length // self.size

    def local_shard(self, values: np.ndarray, axis: int | None) -> np.ndarray:
        """This rank's slice of an array along an axis; all of it where the axis is None."""
        if axis is None or self.size == 1:
            return values
        width = self.local_size(values.shape[axis])
        return values.take(range(self.rank * width, (self.rank + 1) * width), axis)

    def all_gather(self, values: Tensor, axis: int | None) -> np.ndarray:
        """What the ranks' slices along an axis make up."""
        if axis is None or self.size == 1:
            return values.numpy()
        slices: list[Tensor] = []
        dist.all_gather(slices, values.contiguous(), group=self.group)
        return np.concatenate([part.numpy() for part in slices], axis)

    def copy_to_tp(self, x: Tensor) -> Tensor:
        """Hidden states for a block: [..., H] as it is, or of all tokens, [1, T, H]; gradients of all ranks add up."""
        if self.size == 1:
            return x
        if not self.sequence_parallel_active:
            return mp_ops._c_identity(x, self.group, self.skip_c_identity)
        return AllGatherOp.apply(_rows(x)).unsqueeze(0)

    def reduce_from_tp(self, x: Tensor) -> Tensor:
        """The sum of what the ranks' slices of a block gave: on every rank [..., H], or its tokens' [1, T / n, H]."""
        if self.size == 1:
            return x
        if not self.sequence_parallel_active:
            return mp_ops._mp_allreduce(x, group=self.group, skip_c_identity_dynamic=self.skip_c_identity)
        return ReduceScatterOp.apply(_rows(x)).unsqueeze(0)

    def gather_from_tp(self, x: Tensor) -> Tensor:
        """All ranks' slices of the last axis together; the gradient is this rank's slice."""
        return x if self.size == 1 else mp_ops._c_concat(x, group=self.group)

    def local_tokens(self, x_BS: Tensor) -> Tensor:
        """What belongs to the tokens that this rank has outside of blocks, [1, T / n]; x as it is where it has all."""
        if not self.sequence_parallel_active:
            return x_BS
        flat = x_BS.reshape([1, -1])
        width = self.local_size(flat.shape[1])
        return flat[:, self.rank * width : (self.rank + 1) * width]

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the group, without a gradient of its own."""
        return self._reduced(x, dist.ReduceOp.SUM)

    def maximum(self, x: Tensor) -> Tensor:
        """The maximum over the group, without a gradient of its own."""
        return self._reduced(x, dist.ReduceOp.MAX)

    def minimum(self, x: Tensor) -> Tensor:
        """The minimum over the group, without a gradient of its own."""
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

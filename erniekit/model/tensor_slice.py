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


class _Undivided:
    """A switch that all layers of a model share."""

    now = False


@dataclass(frozen=True)
class TensorSlice:
    """One rank of a tensor-parallel group; `WHOLE` is the group of one, whose every method returns what it is given.

    The exchanges are fleet's, each with its gradient; those of tokens use fleet's own tensor-parallel group.

    Attributes:
        rank, size: this rank's number in the group, and how many there are.
        group: fleet's tensor-parallel group.
        sequence: whether hidden states are divided along the sequence outside of blocks.
        skips_copies: what enters and leaves a block is not copied (`enable_mp_skip_c_identity`).
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    sequence: bool = False
    skips_copies: bool = False
    _undivided: _Undivided = field(default_factory=lambda: _Undivided())

    @property
    def divides_tokens(self) -> bool:
        """Whether hidden states outside of blocks are of this rank's tokens, at this moment."""
        return self.size > 1 and self.sequence and not self._undivided.now

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """Inside, every rank has the hidden states of all tokens, as without sequence parallelism: answers are written
        one token at a time. Holds for every layer that was given this slice, or one made from it by `replace`."""
        self._undivided.now = True
        try:
            yield
        finally:
            self._undivided.now = False

    def part(self, length: int) -> int:
        """The length of a slice of an axis; the axis can be divided, which the runner has checked."""
        assert length % self.size == 0
        return length // self.size

    def cut(self, values: np.ndarray, axis: int | None) -> np.ndarray:
        """This rank's slice of an array along an axis; all of it where the axis is None."""
        if axis is None or self.size == 1:
            return values
        width = self.part(values.shape[axis])
        return values.take(range(self.rank * width, (self.rank + 1) * width), axis)

    def whole(self, values: Tensor, axis: int | None) -> np.ndarray:
        """What the ranks' slices along an axis make up."""
        if axis is None or self.size == 1:
            return values.numpy()
        slices: list[Tensor] = []
        dist.all_gather(slices, values.contiguous(), group=self.group)
        return np.concatenate([part.numpy() for part in slices], axis)

    def enter(self, x: Tensor) -> Tensor:
        """Hidden states for a block: [..., H] as it is, or of all tokens, [1, T, H]; gradients of all ranks add up."""
        if self.size == 1:
            return x
        if not self.divides_tokens:
            return mp_ops._c_identity(x, self.group, self.skips_copies)
        return AllGatherOp.apply(_rows(x)).unsqueeze(0)

    def leave(self, x: Tensor) -> Tensor:
        """The sum of what the ranks' slices of a block gave: on every rank [..., H], or its tokens' [1, T / n, H]."""
        if self.size == 1:
            return x
        if not self.divides_tokens:
            return mp_ops._mp_allreduce(x, group=self.group, skip_c_identity_dynamic=self.skips_copies)
        return ReduceScatterOp.apply(_rows(x)).unsqueeze(0)

    def side_by_side(self, x: Tensor) -> Tensor:
        """All ranks' slices of the last axis together; the gradient is this rank's slice."""
        return x if self.size == 1 else mp_ops._c_concat(x, group=self.group)

    def own_tokens(self, x_BS: Tensor) -> Tensor:
        """What belongs to the tokens that this rank has outside of blocks, [1, T / n]; x as it is where it has all."""
        if not self.divides_tokens:
            return x_BS
        flat = x_BS.reshape([1, -1])
        width = self.part(flat.shape[1])
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


WHOLE = TensorSlice()


def _rows(x: Tensor) -> Tensor:
    return x.reshape([-1, x.shape[-1]])

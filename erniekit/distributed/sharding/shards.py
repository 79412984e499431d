"""The shard of a parameter that each rank of a sharding group updates, and how to gather and split it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.distributed.communication.group import Group


@dataclass(frozen=True)
class ParamShard:
    """How one parameter is sharded: each rank updates a contiguous range of its flat values.

    Attributes:
        shape: of the full parameter.
        dtype: of its values.
        ranges: (start, stop) for each member of the group, with start == stop if it has no values. If the parameter
            is not sharded, all members have the full range.
        tensor: updated by this rank's AdamW: its range, perhaps with padding after it; None if it has no values.
        name: of that tensor in AdamW.
    """

    shape: tuple[int, ...]
    dtype: paddle.dtype
    ranges: tuple[tuple[int, int], ...]
    tensor: Tensor | None
    name: str

    @property
    def is_sharded(self) -> bool:
        """Whether ranks have different values."""
        return len(set(self.ranges)) > 1


def owner_shard(parameter: Tensor, owner: int, group: Group) -> ParamShard:
    """Return the sharding of a parameter that one member updates alone."""
    ranges = tuple((0, parameter.size if member == owner else 0) for member in range(group.nranks))
    return ParamShard(
        tuple(parameter.shape), parameter.dtype, ranges, parameter if owner == group.rank else None, parameter.name
    )


@paddle.no_grad()
def mean_to_sum(updated: Iterable[Tensor], ranks: int) -> list[Tensor]:
    """Turn fleet's mean gradients into sums: the loss is divided only once, by the full step."""
    updated = list(updated)
    for tensor in updated:
        tensor.grad.scale_(float(ranks))
    return updated


def all_gather_param(shard: ParamShard, local: Tensor | None, group: Group, dtype: paddle.dtype) -> Tensor:
    """All-gather a tensor that is sharded like a parameter; return it in the parameter's shape on every member.

    All members of the group call this, in the same order.

    Args:
        local: this rank's values, laid out like `shard.tensor`; None if it has none.
        dtype: of the values.
    """
    if not shard.is_sharded:
        assert local is not None
        return local.reshape(shard.shape)
    pieces = []
    for member, (start, stop) in enumerate(shard.ranges):
        if start < stop:
            mine = member == group.rank
            piece = local.flatten()[: stop - start] if mine else paddle.empty([stop - start], dtype)  # type: ignore[union-attr]
            dist.broadcast(piece, src=group.ranks[member], group=group)
            pieces.append(piece)
    return (pieces[0] if len(pieces) == 1 else paddle.concat(pieces)).reshape(shard.shape)


def broadcast_scalar(shard: ParamShard, value: Tensor | None, group: Group, dtype: paddle.dtype) -> Tensor:
    """Broadcast a scalar that all members with values share (a power of beta) to the members without."""
    holder = next(member for member, (start, stop) in enumerate(shard.ranges) if start < stop)
    value = paddle.empty([1], dtype) if value is None else value.clone()
    dist.broadcast(value, src=group.ranks[holder], group=group)
    return value


def local_shard(shard: ParamShard, full: np.ndarray, member: int) -> np.ndarray:
    """Return this member's range of `full` in the shape of `shard.tensor`, padded with 0."""
    assert shard.tensor is not None
    start, stop = shard.ranges[member]
    local = np.zeros(shard.tensor.size, full.dtype)
    local[: stop - start] = full.reshape(-1)[start:stop]
    return local.reshape(shard.tensor.shape)

"""Which values of a parameter each rank of a sharding group updates, and how they come together again."""

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
    """How one parameter is divided: each rank updates a contiguous run of its values, taken as one row.

    Attributes:
        shape: of the whole parameter.
        dtype: of its values.
        ranges: (start, stop) for each member of the group, start == stop where it has nothing. All have the whole run
            where the parameter is not divided.
        tensor: what this rank's AdamW updates: its run, perhaps with padding after it; None where it has nothing.
        name: of that tensor for AdamW.
    """

    shape: tuple[int, ...]
    dtype: paddle.dtype
    ranges: tuple[tuple[int, int], ...]
    tensor: Tensor | None
    name: str

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold different values."""
        return len(set(self.ranges)) > 1


def owner_shard(parameter: Tensor, owner: int, group: Group) -> ParamShard:
    """The share of a parameter that one member updates alone."""
    ranges = tuple((0, parameter.size if member == owner else 0) for member in range(group.nranks))
    return ParamShard(
        tuple(parameter.shape), parameter.dtype, ranges, parameter if owner == group.rank else None, parameter.name
    )


@paddle.no_grad()
def mean_to_sum(updated: Iterable[Tensor], ranks: int) -> list[Tensor]:
    """The tensors, their gradients sums where fleet has made means: the loss is divided once, by the whole step."""
    updated = list(updated)
    for tensor in updated:
        tensor.grad.scale_(float(ranks))
    return updated


def all_gather_param(shard: ParamShard, local: Tensor | None, group: Group, dtype: paddle.dtype) -> Tensor:
    """The whole of something that is divided as a parameter is, in the parameter's shape, on every member.

    All members of the group call this, in the same order.

    Args:
        local: this rank's values, which lie as `share.tensor` does; None where it has nothing.
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
    """What each member that has a part of the parameter holds alike (a power of beta), on those that have none, too."""
    holder = next(member for member, (start, stop) in enumerate(shard.ranges) if start < stop)
    value = paddle.empty([1], dtype) if value is None else value.clone()
    dist.broadcast(value, src=group.ranks[holder], group=group)
    return value


def local_shard(shard: ParamShard, full: np.ndarray, member: int) -> np.ndarray:
    """This member's run of `whole`, in the shape of `share.tensor`, padding 0."""
    assert shard.tensor is not None
    start, stop = shard.ranges[member]
    local = np.zeros(shard.tensor.size, full.dtype)
    local[: stop - start] = full.reshape(-1)[start:stop]
    return local.reshape(shard.tensor.shape)

"""Keep replicated parameters equal in a tensor-parallel group: norms, biases after a sum, factors of adapters.

All ranks compute the same values, so the copies stay equal. If kernels sum in varying order, they may drift apart over
a long run; `sync_grad`, `sync_param` and `sync_moment` broadcast those of the first rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import paddle.distributed as dist
from paddle import Tensor
from paddle.distributed.communication.group import Group

from erniekit.model.architectures.architecture import Architecture

SYNC_FLAGS = frozenset(("sync_grad", "sync_param", "sync_moment"))
MOMENTS = ("moment1", "moment2")


class ReplicatedParameterSync:
    """Keeps the copies of replicated parameters equal.

    Args:
        architecture: the model's, which says what every rank has a copy of.
        parameters: the trained weights, by name.
        updated: the part of them that this rank updates, if a sharding group shards the optimizer.
        state: (a kind of state, a tensor of `updated`) -> its AdamW state.
        group: the tensor-parallel group.
        flags: of `tensor_parallel_config`.
    """

    def __init__(
        self,
        architecture: Architecture,
        parameters: Mapping[str, Tensor],
        state: Callable[[str, Tensor], Tensor],
        group: Group,
        flags: Collection[str],
        updated: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._parameters, self._updated = (
            _replicated(architecture, parameters),
            _replicated(architecture, parameters if updated is None else updated),
        )
        self._state, self._group, self._flags = state, group, flags

    def before_update(self) -> None:
        """Broadcast gradients."""
        if "sync_grad" in self._flags:
            self._broadcast(tensor.grad for tensor in self._updated)

    def after_update(self) -> None:
        """Broadcast parameters and moments."""
        if "sync_param" in self._flags:
            self._broadcast(self._parameters)
        if "sync_moment" in self._flags:
            self._broadcast(self._state(kind, tensor) for tensor in self._updated for kind in MOMENTS)

    def _broadcast(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, src=self._group.ranks[0], group=self._group)


def _replicated(architecture: Architecture, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the weights that every rank of a tensor-parallel group has in full."""
    placements = {name: architecture.placement(name) for name in tensors}
    return [
        tensors[name]
        for name, weight_placement in placements.items()
        if weight_placement.axis is None and weight_placement.expert is None
    ]

"""What every rank of a tensor-parallel group has a copy of: norms, biases after a sum, factors of adapters.

The same numbers are computed on all of them, so the copies stay equal. Where kernels add in an order of their own,
they may drift apart over a long run; with `sync_grad`, `sync_param` and `sync_moment` all ranks take the first one's.
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
    """Keeps copies equal.

    Args:
        architecture: the model's, which says what every rank has a copy of.
        parameters: the trained weights, by name.
        updated: what this rank updates of them, where ranks of a sharding group divide that.
        state: (a kind of state, a tensor of `updated`) -> what AdamW remembers of it.
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
        """Equal gradients."""
        if "sync_grad" in self._flags:
            self._broadcast(tensor.grad for tensor in self._updated)

    def after_update(self) -> None:
        """Equal parameters and moments."""
        if "sync_param" in self._flags:
            self._broadcast(self._parameters)
        if "sync_moment" in self._flags:
            self._broadcast(self._state(kind, tensor) for tensor in self._updated for kind in MOMENTS)

    def _broadcast(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, src=self._group.ranks[0], group=self._group)


def _replicated(architecture: Architecture, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Those of weights that every rank of a tensor-parallel group has whole."""
    placements = {name: architecture.placement(name) for name in tensors}
    return [
        tensors[name]
        for name, weight_placement in placements.items()
        if weight_placement.axis is None and weight_placement.expert is None
    ]

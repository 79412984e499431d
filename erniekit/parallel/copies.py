"""What every rank of a tensor-parallel group has a copy of: norms, biases after a sum, factors of adapters.

The same numbers are computed on all of them, so the copies stay equal. Where kernels add in an order of their own,
they may drift apart over a long run; with `sync_grad`, `sync_param` and `sync_moment` all ranks take the first one's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import paddle.distributed as dist
from paddle import Tensor
from paddle.distributed.communication.group import Group

from erniekit.model.placement import placement

SYNCHRONISED = frozenset(("sync_grad", "sync_param", "sync_moment"))
MOMENTS = ("moment1", "moment2")


class Copies:
    """Keeps copies equal.

    Args:
        updated: by the name of a weight what this rank updates of it, where it updates any.
        state: (a kind of state, a tensor of `updated`) -> what AdamW remembers of it.
        group: the tensor-parallel group.
        words: of `tensor_parallel_config`.
    """

    def __init__(
        self,
        updated: Mapping[str, Tensor],
        state: Callable[[str, Tensor], Tensor],
        group: Group,
        words: Collection[str],
    ) -> None:
        self._copied = [
            tensor
            for name, tensor in updated.items()
            if (place := placement(name)).axis is None and place.expert is None
        ]
        self._state, self._group, self._words = state, group, words

    def before_update(self) -> None:
        """Equal gradients."""
        if "sync_grad" in self._words:
            self._equal(tensor.grad for tensor in self._copied)

    def after_update(self) -> None:
        """Equal parameters and moments."""
        if "sync_param" in self._words:
            self._equal(self._copied)
        if "sync_moment" in self._words:
            self._equal(self._state(kind, tensor) for tensor in self._copied for kind in MOMENTS)

    def _equal(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, src=self._group.ranks[0], group=self._group)

"""Stage 1: the ranks of a sharding group divide what AdamW remembers (ZeRO; Rajbhandari et al., 2019, 1910.02054).

Every rank has all parameters and all gradients. After the micro-batches each gradient is summed on the rank that
updates its parameter, which then sends the new values to the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

from paddle import Tensor
from paddle.distributed import fleet
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizer,
    DygraphShardingOptimizerV2,
)
from paddle.optimizer import AdamW

from erniekit.parallel.sharding.shares import Share, owned, summed
from erniekit.training.passes import LossOfBatch


class WholeParameters:
    """Each parameter is updated by one rank, the largest first, by the rank that has least so far."""

    def __init__(self, optimizer: AdamW, parameters: Mapping[str, Tensor], group: Group) -> None:
        self._group, self._groups = group, fleet.get_hybrid_communicate_group()
        self._parameters = list(parameters.values())
        self._fleet = DygraphShardingOptimizer(optimizer, self._groups)
        self._updated: list[Tensor] = list(optimizer._parameter_list)

    def share(self, parameter: Tensor) -> Share:
        return owned(parameter, self._fleet._param2rank[parameter.name], self._group)

    def present(self, parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
        return nullcontext()

    def weight(self, parameter: Tensor) -> Tensor:
        return parameter

    def wrap(self, loss: LossOfBatch) -> LossOfBatch:
        return loss

    def reduce_gradients(self) -> list[Tensor]:
        self._fleet.reduce_gradients(self._parameters, self._groups)
        return summed(self._updated, self._group.nranks)

    def step(self) -> None:
        self._fleet.step()

    def clear_grad(self, set_to_zero: bool) -> None:
        self._fleet.clear_grad(set_to_zero)


class SplitParameters:
    """Each parameter is divided evenly between all ranks (fleet's `split_param`)."""

    def __init__(self, optimizer: AdamW, parameters: Mapping[str, Tensor], group: Group) -> None:
        self._group, self._groups = group, fleet.get_hybrid_communicate_group()
        self._parameters = list(parameters.values())
        self._fleet = DygraphShardingOptimizerV2(optimizer, self._groups)
        views = [buffer._sharding_param_grad_view for buffer in self._fleet._comm_buffer_list]
        self._views = {name: view for part in views for name, view in part.items()}
        for name, view in self._views.items():
            if view.has_effective_slice_param:
                view.fill_slice_param(self._fleet._slice_params[name])
        self._updated: list[Tensor] = [
            self._fleet._slice_params[name] for name, view in self._views.items() if view.has_effective_slice_param
        ]

    def share(self, parameter: Tensor) -> Share:
        buffer = self._fleet.param2bucket[parameter.name][0]
        view, length = self._views[parameter.name], buffer.buffer_size // self._group.nranks
        edges = [min(max(member * length - view._index, 0), parameter.size) for member in range(self._group.nranks)]
        runs = tuple(zip(edges, [*edges[1:], parameter.size], strict=True))
        tensor = self._fleet._slice_params[parameter.name] if view.has_effective_slice_param else None
        return Share(tuple(parameter.shape), parameter.dtype, runs, tensor)

    def present(self, parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
        return nullcontext()

    def weight(self, parameter: Tensor) -> Tensor:
        return parameter

    def wrap(self, loss: LossOfBatch) -> LossOfBatch:
        return loss

    def reduce_gradients(self) -> list[Tensor]:
        self._fleet.reduce_gradients(self._parameters, self._groups)
        self._fleet._collect_comm_buffers()
        self._fleet._assign_slice_grad()
        return summed(self._updated, self._group.nranks)

    def step(self) -> None:
        self._fleet.step()

    def clear_grad(self, set_to_zero: bool) -> None:
        # Not fleet's, which clears each parameter's gradient: that may leave the buffer, and then the next step sends
        # what the buffer still holds.
        for buffer in self._fleet._comm_buffer_list:
            buffer.grad_storage.zero_()

"""ZeRO stage 1: the ranks of a sharding group shard optimizer states (Rajbhandari et al., 2019, arXiv:1910.02054).

Every rank has all parameters and all gradients. After the micro-batches each gradient is summed on the rank that
updates its parameter, which then sends the new values to the others.
"""

from __future__ import annotations

from collections.abc import Mapping

import paddle
from paddle import Tensor
from paddle.distributed import fleet
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizer,
    DygraphShardingOptimizerV2,
)
from paddle.optimizer import AdamW

from erniekit.distributed.sharding.shards import ParamShard, mean_to_sum, owner_shard
from erniekit.distributed.sharding.stage import identity, local_gradients, no_gather


class OwnerShardedStates:
    """Each parameter is updated by one rank: the largest first, by the rank with the fewest values so far.

    With `fused`, the parameters of a rank are in a few buffers, which are exchanged instead (`tensor_fusion`).
    """

    reduces_in_backward = False
    full_param = local_param = wrap = staticmethod(identity)
    gather_params, gradients = staticmethod(no_gather), staticmethod(local_gradients)

    def __init__(
        self, optimizer: AdamW, parameters: Mapping[str, Tensor], group: Group, *, fused: bool = False
    ) -> None:
        _configure(tensor_fusion=fused)
        self._group, self._groups, self._fused = group, fleet.get_hybrid_communicate_group(), fused
        decays = optimizer._apply_decay_param_fun
        self._fleet = DygraphShardingOptimizer(optimizer, self._groups)
        optimizer._apply_decay_param_fun = decays  # fleet's only knows fused parameters
        self._updated: list[Tensor] = self._fleet._rank2params[group.rank]

    def param_shard(self, parameter: Tensor) -> ParamShard:
        return owner_shard(parameter, self._fleet._param2rank[parameter.name], self._group)

    def reduce_gradients(self) -> list[Tensor]:
        self._fleet.reduce_gradients(self._fleet._parameter_list, self._groups)
        return mean_to_sum(self._updated, self._group.nranks)

    def step(self) -> None:
        self._fleet.step()

    @paddle.no_grad()
    def clear_grad(self, set_to_zero: bool) -> None:
        # The gradients of fused parameters are views of a buffer that stays.
        self._fleet.clear_grad(set_to_zero or self._fused)


class SplitShardedStates:
    """Each parameter is sharded evenly over all ranks (fleet's `split_param`).

    With `release`, the memory of gradients is freed after every step.
    """

    reduces_in_backward = False
    full_param = local_param = wrap = staticmethod(identity)
    gather_params, gradients = staticmethod(no_gather), staticmethod(local_gradients)

    def __init__(
        self, optimizer: AdamW, parameters: Mapping[str, Tensor], group: Group, *, release: bool = False
    ) -> None:
        _configure(release_gradients=release)
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

    def param_shard(self, parameter: Tensor) -> ParamShard:
        buffer = self._fleet.param2bucket[parameter.name][0]
        view, length = self._views[parameter.name], buffer.buffer_size // self._group.nranks
        edges = [min(max(member * length - view._index, 0), parameter.size) for member in range(self._group.nranks)]
        ranges = tuple(zip(edges, [*edges[1:], parameter.size], strict=True))
        tensor = self._fleet._slice_params[parameter.name] if view.has_effective_slice_param else None
        return ParamShard(tuple(parameter.shape), parameter.dtype, ranges, tensor, parameter.name)

    def reduce_gradients(self) -> list[Tensor]:
        self._fleet.reduce_gradients(self._parameters, self._groups)
        self._fleet._collect_comm_buffers()
        self._fleet._assign_slice_grad()
        return mean_to_sum(self._updated, self._group.nranks)

    def step(self) -> None:
        self._fleet.step()

    @paddle.no_grad()
    def clear_grad(self, set_to_zero: bool) -> None:
        # Not fleet's method, which clears each parameter's gradient: the gradient may then leave the buffer, and the
        # next step sends the old values of the buffer.
        for buffer in self._fleet._comm_buffer_list:
            if not self._fleet.sd_release_grads:
                buffer.grad_storage.zero_()
            elif buffer.grad_storage is not None:
                for tensor in (*buffer.params, *self._updated):
                    tensor.clear_gradient(False)
                buffer._clear_grad_storage()


def _configure(**options: bool) -> None:
    """Set fleet's options of stage 1, which it reads when an optimizer is wrapped.

    `use_reduce_avg` is off, because not every device can average; fleet then divides before it sums, and we undo that.
    """
    configs = fleet.fleet._user_defined_strategy.hybrid_configs["sharding_configs"]
    for name, value in {"use_reduce_avg": False, "fuse_optimizer": False, **options}.items():
        setattr(configs, name, value)

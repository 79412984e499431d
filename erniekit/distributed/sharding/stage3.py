"""ZeRO stage 3: the ranks of a sharding group also shard parameters (Rajbhandari et al., 2019, arXiv:1910.02054).

fleet's hooks gather a layer's parameters just before its forward and its backward pass and free them afterwards. So a
weight must be used inside the `forward` of the layer that owns it, and every rank must reach all layers, in the same
order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import paddle
from paddle import Tensor, nn
from paddle.autograd import PyLayer
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 import (
    GroupShardedStage3,
    _allgather_buffer,
    _release_param,
)
from paddle.optimizer import AdamW

from erniekit.distributed.sharding.shards import ParamShard, all_gather_param, mean_to_sum
from erniekit.distributed.sharding.stage import SLICE_PREFIX, LossLayer
from erniekit.training.objectives.forward import LossFunction, MicroBatchLoss

NOT_SHARDED = ["GateStatistics"]  # a router uses and sets these few numbers outside of `forward`


class ShardedParameters:
    """Every parameter, including frozen ones, is sharded evenly over all ranks."""

    reduces_in_backward = True

    def __init__(self, optimizer: AdamW, group: Group, model: nn.Layer) -> None:
        if not model.head.parameters():
            model.head.extra_parameters = model.embedding.parameters()  # tied: they are gathered for the head as well
        decays = optimizer._apply_decay_param_fun
        optimizer._apply_decay_param_fun = lambda name: decays(name.removeprefix(SLICE_PREFIX))
        self._layer = GroupShardedStage3(
            LossLayer(model),
            optimizer,
            group=group,
            device=paddle.get_device().partition(":")[0],
            segment_size=0,
            pretrain_sync_models=False,
            sync_comm=True,  # prefetching follows the order of the first pass, and evaluation has another
            exclude_layer=NOT_SHARDED,
        )
        self._optimizer, self._group = optimizer, group
        for layer in model.sublayers():
            frozen = [p for p in self._layer._trainable_params.get(id(layer), []) if p.stop_gradient]
            if frozen:
                self._free_after_backward(layer, frozen)
        self._frozen = [p for p in model.parameters() if p.stop_gradient and p.name in self._layer._param2buffer]
        optimizer.update_scaler = True  # `reduce_gradients` does what `step` would do before the update

    def param_shard(self, parameter: Tensor) -> ParamShard:
        size, pieces = parameter.size, self._layer._param2buffer.get(parameter.name)
        if pieces is None:
            ranges, tensor = ((0, size),) * self._group.nranks, parameter
        else:
            ranges, tensor = tuple((min(start, size), min(stop, size)) for start, stop in pieces), parameter.fw_storage
        # Under its own name fleet's slice is only known until a pass has gathered it.
        return ParamShard(tuple(parameter.shape), parameter.dtype, ranges, tensor, SLICE_PREFIX + parameter.name)

    @contextmanager
    def gather_params(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        sharded = [parameter for parameter in parameters if parameter.name in self._layer._param2buffer]
        _allgather_buffer(
            sharded,
            self._group,
            param2buffer_size=self._layer._param2buffer_size,
            use_calc_stream=True,
            task_flow=self._layer._task_flow,
            sync_wait=True,
        )
        try:
            yield
        finally:
            self._free(sharded)

    def full_param(self, parameter: Tensor) -> Tensor:
        """Return a full parameter of the model, frozen or not; all ranks of the group call this together.

        Not fleet's `get_all_parameters`, which leaves all parameters gathered.
        """
        param_shard = self.param_shard(parameter)
        return all_gather_param(param_shard, param_shard.tensor, self._group, param_shard.dtype)

    def local_param(self, weight: Tensor) -> Tensor:
        local = self.param_shard(weight).tensor
        assert local is not None
        return local

    def wrap(self, loss: LossFunction) -> LossFunction:
        def wrapped(model: Any, batch: Any) -> MicroBatchLoss:
            return self._layer(loss, batch)

        return wrapped

    def gradients(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        return [parameter.bw_storage for parameter in parameters if parameter.bw_storage is not None]

    def reduce_gradients(self) -> list[Tensor]:
        for parameter in self._frozen:  # of layers whose inputs have no gradient
            if parameter.status == "all":
                parameter.use_count = 1
                self._free([parameter])
        self._optimizer.update_slice()
        return mean_to_sum(self._optimizer._parameter_list, self._group.nranks)

    def step(self) -> None:
        self._optimizer.step()

    def clear_grad(self, set_to_zero: bool) -> None:
        self._optimizer.clear_grad()

    def _free_after_backward(self, layer: nn.Layer, frozen: list[Tensor]) -> None:
        """Free frozen parameters after a layer's backward pass.

        fleet gathers them for the pass too, but only frees a parameter when its gradient is computed. So free them when
        the gradient of the layer's input is computed.
        """

        def before_forward(layer: nn.Layer, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            x, *others = inputs
            return inputs if x.stop_gradient else (_AfterBackward.apply(x, lambda: self._free(frozen)), *others)

        layer.register_forward_pre_hook(before_forward)

    def _free(self, parameters: list[Tensor]) -> None:
        _release_param(parameters, self._layer._param2buffer, self._group.rank, self._layer._task_flow)


class _AfterBackward(PyLayer):
    """Returns the value unchanged; calls `callback` when its gradient has been computed."""

    @staticmethod
    def forward(ctx, value, callback):  # type: ignore[no-untyped-def]
        ctx.callback = callback
        return paddle.assign(value)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.callback()
        return grad

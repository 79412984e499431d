"""Stage 3: the ranks of a sharding group divide parameters, too (ZeRO; Rajbhandari et al., 2019, 1910.02054).

A layer's parameters are gathered just before its forward and its backward pass and freed after them, by hooks of
fleet's on the layer. So a weight is to be used inside the `forward` of the layer that owns it, and every rank must come
to all layers, in the same order.
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

from erniekit.parallel.sharding.loss_layer import LossLayer
from erniekit.parallel.sharding.shares import Share, summed, together
from erniekit.parallel.sharding.stage import SLICE
from erniekit.training.passes import LossOfBatch, MicroLoss

NOT_DIVIDED = ["GateStatistics"]  # a router uses and sets these few numbers itself


class DividedParameters:
    """Every parameter is divided evenly between all ranks, frozen ones too."""

    adds_in_passes = True

    def __init__(self, optimizer: AdamW, group: Group, model: nn.Layer) -> None:
        if not model.head.parameters():
            model.head.extra_parameters = [model.head.projection]  # tied embeddings: gathered for the head, too
        decays = optimizer._apply_decay_param_fun
        optimizer._apply_decay_param_fun = lambda name: decays(name.removeprefix(SLICE))
        self._layer = GroupShardedStage3(
            LossLayer(model),
            optimizer,
            group=group,
            device=paddle.get_device().partition(":")[0],
            segment_size=0,
            pretrain_sync_models=False,
            sync_comm=True,  # fetching ahead follows the order of the first pass, and evaluation has another
            exclude_layer=NOT_DIVIDED,
        )
        self._optimizer, self._group = optimizer, group
        for layer in model.sublayers():
            frozen = [p for p in self._layer._trainable_params.get(id(layer), []) if p.stop_gradient]
            if frozen:
                self._free_after_backward(layer, frozen)
        self._frozen = [p for p in model.parameters() if p.stop_gradient and p.name in self._layer._param2buffer]
        optimizer.update_scaler = True  # `step` leaves to us what comes before the update: `reduce_gradients`

    def share(self, parameter: Tensor) -> Share:
        size, pieces = parameter.size, self._layer._param2buffer.get(parameter.name)
        if pieces is None:
            runs, tensor = ((0, size),) * self._group.nranks, parameter
        else:
            runs, tensor = tuple((min(start, size), min(stop, size)) for start, stop in pieces), parameter.fw_storage
        # by its own name fleet's slice is known only until a pass has gathered it
        return Share(tuple(parameter.shape), parameter.dtype, runs, tensor, SLICE + parameter.name)

    @contextmanager
    def present(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        divided = [parameter for parameter in parameters if parameter.name in self._layer._param2buffer]
        _allgather_buffer(
            divided,
            self._group,
            param2buffer_size=self._layer._param2buffer_size,
            use_calc_stream=True,
            task_flow=self._layer._task_flow,
            sync_wait=True,
        )
        try:
            yield
        finally:
            self._free(divided)

    def weight(self, parameter: Tensor) -> Tensor:
        """The whole of one of the model's parameters, frozen or not; all ranks of the group call this together.

        Not fleet's `get_all_parameters`, which leaves all of them gathered.
        """
        share = self.share(parameter)
        return together(share, share.tensor, self._group, share.dtype)

    def part(self, weight: Tensor) -> Tensor:
        own = self.share(weight).tensor
        assert own is not None
        return own

    def wrap(self, loss: LossOfBatch) -> LossOfBatch:
        def wrapped(model: Any, batch: Any) -> MicroLoss:
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
        return summed(self._optimizer._parameter_list, self._group.nranks)

    def step(self) -> None:
        self._optimizer.step()

    def clear_grad(self, set_to_zero: bool) -> None:
        self._optimizer.clear_grad()

    def _free_after_backward(self, layer: nn.Layer, frozen: list[Tensor]) -> None:
        """Fleet gathers frozen parameters for a backward pass, too, and frees what has a gradient when that is made; so
        free these when the gradient of the layer's input is made."""

        def before_forward(layer: nn.Layer, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            x, *others = inputs
            return inputs if x.stop_gradient else (_AfterBackward.apply(x, lambda: self._free(frozen)), *others)

        layer.register_forward_pre_hook(before_forward)

    def _free(self, parameters: list[Tensor]) -> None:
        _release_param(parameters, self._layer._param2buffer, self._group.rank, self._layer._task_flow)


class _AfterBackward(PyLayer):
    """The value unchanged; calls `then` when its gradient has been made."""

    @staticmethod
    def forward(ctx, value, then):  # type: ignore[no-untyped-def]
        ctx.then = then
        return paddle.assign(value)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.then()
        return grad

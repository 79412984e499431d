"""The interface of the three sharding stages, and defaults for stages in which every rank has all parameters."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from paddle import Tensor, nn

from erniekit.distributed.sharding.shards import ParamShard
from erniekit.training.objectives.forward import LossFunction, MicroBatchLoss

T = TypeVar("T")
SLICE_PREFIX = "slice@"  # fleet's prefix for the name of a parameter's shard in stage 3; stage 1 uses none


class ShardingStrategy(Protocol):
    """One of fleet's sharding stages, on one rank of a sharding group.

    A step runs: micro-batches with the loss of `wrap`, `reduce_gradients`, clipping, `step`, `clear_grad`.

    Attributes:
        reduces_in_backward: whether gradients are reduced over the group in every backward pass, or once per step.
    """

    reduces_in_backward: bool

    def param_shard(self, parameter: Tensor) -> ParamShard:
        """Return which values of a trained parameter each rank updates."""
        ...

    def local_param(self, weight: Tensor) -> Tensor:
        """Return this rank's values of a parameter of the model between steps."""
        ...

    def wrap(self, loss: LossFunction) -> LossFunction:
        """Return the loss to use, which calls fleet's wrapper of the model."""
        ...

    def gradients(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return the gradients of the trained parameters on this rank after backward passes."""
        ...

    def reduce_gradients(self) -> list[Tensor]:
        """Return the tensors that this rank updates, each with its gradient summed over the sharding group."""
        ...

    def step(self) -> None:
        """Update this rank's values; all-gather them if every rank keeps all."""
        ...

    def clear_grad(self, set_to_zero: bool) -> None:
        """Clear the gradients; `set_to_zero` keeps their memory if the stage has any."""
        ...

    def gather_params(self, parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Inside, these parameters of the model are full, to be read or set; all ranks of the group enter together."""
        ...

    def full_param(self, parameter: Tensor) -> Tensor:
        """Return a full parameter of the model; if parameters are sharded, all ranks of the group
        call this together."""
        ...


# Stages in which every rank has all parameters use these functions as methods.


def identity(given: T) -> T:
    """Return the argument unchanged: parameters are not sharded here, and a loss needs no wrapper."""
    return given


def no_gather(parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Return an empty context: all ranks always have all values."""
    return nullcontext()


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that passes have left on the parameters."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


# A full forward pass as a layer, which fleet's sharded wrappers need.


class LossLayer(nn.Layer):
    """A layer that maps (loss, batch) to the loss of the batch under the model."""

    def __init__(self, model: nn.Layer) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: LossFunction, batch: Any) -> MicroBatchLoss:
        return loss(self.model, batch)

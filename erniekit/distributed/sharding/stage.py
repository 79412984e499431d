"""What the three stages of sharding have in common."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from paddle import Tensor, nn

from erniekit.distributed.sharding.shards import ParamShard
from erniekit.training.objectives.forward import LossFunction, MicroBatchLoss

T = TypeVar("T")
SLICE_PREFIX = (
    "slice@"  # what fleet puts before the name of a parameter's part in stage 3; in stage 1 it has the same name
)


class ShardingStrategy(Protocol):
    """One of fleet's ways to divide a run's memory among the ranks of a sharding group, seen from one of them.

    A step goes: micro-batches with the loss of `wrap`, `reduce_gradients`, clipping, `step`, `clear_grad`.

    Attributes:
        reduces_in_backward: whether gradients are added up over the group in every backward pass, or once a step.
    """

    reduces_in_backward: bool

    def param_shard(self, parameter: Tensor) -> ParamShard:
        """Which values of a trained parameter each rank updates."""
        ...

    def local_param(self, weight: Tensor) -> Tensor:
        """What of one of the model's parameters this rank has between steps."""
        ...

    def wrap(self, loss: LossFunction) -> LossFunction:
        """Return the loss to use, which calls fleet's wrapper of the model."""
        ...

    def gradients(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """What backward passes have left on this rank, of the trained parameters."""
        ...

    def reduce_gradients(self) -> list[Tensor]:
        """What this rank updates, each with its gradient summed over the sharding group."""
        ...

    def step(self) -> None:
        """Update this rank's values, and exchange them where every rank keeps all."""
        ...

    def clear_grad(self, set_to_zero: bool) -> None:
        """Forget the gradients; `set_to_zero` keeps their memory where the stage keeps any."""
        ...

    def gather_params(self, parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Inside, these parameters of the model are whole, to be read or set; all of the group enter together."""
        ...

    def full_param(self, parameter: Tensor) -> Tensor:
        """The whole of one of the model's parameters; where parameters are divided, all ranks call this together."""
        ...


# Where every rank keeps all parameters, a stage takes these in the place of methods of its own.


def identity(given: T) -> T:
    """What a rank has of a parameter is all of it; a loss is used as it is."""
    return given


def no_gather(parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
    """All ranks have all values at any time."""
    return nullcontext()


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Passes leave gradients at the parameters."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


# The whole of a forward pass as a layer, which is what fleet's sharded wrappers call.


class LossLayer(nn.Layer):
    """(loss, batch) -> the loss of the batch under the model."""

    def __init__(self, model: nn.Layer) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: LossFunction, batch: Any) -> MicroBatchLoss:
        return loss(self.model, batch)

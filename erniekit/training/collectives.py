"""What an optimizer step asks of the other ranks of the run, so that one step serves every layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import paddle
from paddle import Tensor

from erniekit.model.local_tensors import FullTensors, LocalTensors, SingleProcessTensors
from erniekit.training.gradients import fill_missing_gradients, global_norm
from erniekit.training.objectives.forward import LossFunction, MicroBatchLoss

ForwardFunction = Callable[[Any, Any], Mapping[str, Tensor]]  # (model, batch); for a decoder a `DecoderPass`


class Ranks(Protocol):
    """The ranks among which a run is divided, as one of them sees them: `SINGLE_PROCESS` here, all others in
    `parallel/`.

    Attributes:
        is_main_process: whether this is the rank that writes and prints for all.
        num_forward_batches: how many batches `measure` is best given at a time.
        rank: the number of this one.
        layout: how the run is divided, by parameter; runs with the same layout have the same on each rank.
    """

    @property
    def is_main_process(self) -> bool: ...
    @property
    def num_forward_batches(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def layout(self) -> Mapping[str, Any]: ...

    def sum(self, values: np.ndarray) -> np.ndarray:
        """The float64 sum of figures over the ranks that work on different data; the same on every rank."""
        ...

    def all_gather_object(self, value: Any) -> list[Any]:
        """What every rank has given, in the order of the ranks. Values are JSON."""
        ...

    def full_tensors(self, local: LocalTensors) -> FullTensors:
        """The tensors that the ranks hold, for the first rank to write; called by every rank."""
        ...

    def local_shard(self, name: str, full: np.ndarray) -> np.ndarray:
        """What this rank holds of a weight, or of `<weight>/<state>`."""
        ...

    def local_shards(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What this rank has of weights between steps: where ranks divide them, its part as it lies in memory."""
        ...

    def gather_params(self, parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Inside, these parameters have all values, to be read or set, also where ranks divide them between steps; all
        that have a part of them enter together."""
        ...

    def forward_backward(
        self,
        model: Any,
        loss: LossFunction,
        batches: Sequence[Any],
        begin_micro_batch: Callable[[int], None],
        units: float,
    ) -> list[MicroBatchLoss]:
        """Forward and backward of this rank's micro-batches; gradients of `loss_sum / units` add up in the parameters.

        Args:
            begin_micro_batch: called with the number of a micro-batch before its forward pass.
            units: what the summed loss is divided by, of the whole step.

        Returns:
            What each micro-batch gave, detached.
        """
        ...

    def forward_only(
        self, model: Any, forward: ForwardFunction, batches: Sequence[Any]
    ) -> list[Mapping[str, np.ndarray]]:
        """What a forward pass without gradients gives of each batch; ranks that share the model have the same."""
        ...

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Make every gradient the sum over all ranks that hold a part of it; called once, after the micro-batches.

        Returns:
            What this rank updates, each with its gradient, perhaps zeros: the parameters, or its shares of them.
        """
        ...

    def global_norm(self, updated: Sequence[Tensor]) -> Tensor:
        """The norm of the gradients of the whole model, 0-d, every value counted once; the same on every rank.

        Args:
            updated: what `reduce_gradients` has returned.
        """
        ...

    def all_finite(self, parameters: Sequence[Tensor]) -> bool:
        """Whether every gradient is finite that this rank's micro-batches gave, also on the ranks that share them."""
        ...

    def after_update(self) -> None:
        """What ranks do together once each has made its update."""
        ...


def forward_backward_no_pipelining(
    model: Any, loss: LossFunction, batches: Sequence[Any], begin_micro_batch: Callable[[int], None], units: float
) -> list[MicroBatchLoss]:
    """One micro-batch after another, forward and backward; see `Ranks.run`."""
    results = []
    for index, batch in enumerate(batches):
        begin_micro_batch(index)
        result = loss(model, batch)
        (result.loss_sum / units).backward()
        results.append(
            MicroBatchLoss(
                result.loss_sum.detach(), {name: value.detach() for name, value in result.metric_sums.items()}
            )
        )
    return results


def forward_only_no_pipelining(
    model: Any, forward: ForwardFunction, batches: Sequence[Any]
) -> list[Mapping[str, np.ndarray]]:
    """One batch after another; see `Ranks.measure`."""
    with paddle.no_grad():
        return [{name: value.numpy() for name, value in forward(model, batch).items()} for batch in batches]


class SingleProcess:
    """One process: everything is here already."""

    is_main_process = True
    num_forward_batches = 1
    rank = 0
    layout: Mapping[str, Any] = {"ranks": 1}

    def sum(self, values: np.ndarray) -> np.ndarray:
        return values

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def full_tensors(self, local: LocalTensors) -> FullTensors:
        return SingleProcessTensors(local)

    def local_shard(self, name: str, full: np.ndarray) -> np.ndarray:
        return full

    def local_shards(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return weights

    def gather_params(self, parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
        return nullcontext()

    forward_backward = staticmethod(forward_backward_no_pipelining)
    forward_only = staticmethod(forward_only_no_pipelining)

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        fill_missing_gradients(parameters)
        return parameters

    def all_finite(self, parameters: Sequence[Tensor]) -> bool:
        return math.isfinite(float(global_norm(parameters)))

    def global_norm(self, updated: Sequence[Tensor]) -> Tensor:
        return global_norm(updated)

    def after_update(self) -> None:
        """Nobody else is there."""


SINGLE_PROCESS: Ranks = SingleProcess()

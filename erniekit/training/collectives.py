"""The collectives that an optimizer step needs, as a protocol, so that one step serves every layout."""

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
from erniekit.training.objectives.forward import Forward, HeadResult, Loss, LossFunction, MicroBatchLoss


class Ranks(Protocol):
    """The ranks of a run, as one of them sees them: `SINGLE_PROCESS` here, or `distributed.collectives.LayoutRanks`.

    Attributes:
        is_main_process: whether this is the rank that writes and prints for all.
        num_forward_batches: how many batches `forward_only` should get at a time.
        rank: the number of this rank.
        layout: the degrees of parallelism, by parameter. In runs with the same layout each rank has the same shards.
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
        """Return the float64 sum of numbers over the ranks that work on different data; the same on every rank."""
        ...

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of the ranks. Values are JSON."""
        ...

    def full_tensors(self, local: LocalTensors) -> FullTensors:
        """Return the full tensors, for the first rank to write; every rank must call it."""
        ...

    def local_shard(self, name: str, full: np.ndarray) -> np.ndarray:
        """Return this rank's shard of a weight, or of `<weight>/<state>`."""
        ...

    def local_shards(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return what this rank keeps of weights between steps: the weights, or their shards as they are in memory."""
        ...

    def gather_params(self, parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Gather these parameters, so that they can be read or set inside the context, also where ranks have shards of
        them between steps; all ranks that have shards of them must enter together."""
        ...

    def forward_backward(
        self,
        model: Any,
        loss: Loss,
        batches: Sequence[Any],
        begin_micro_batch: Callable[[int], None],
        units: float,
    ) -> list[MicroBatchLoss]:
        """Run this rank's micro-batches forward and backward; gradients of `loss_sum / units` add up in the parameters.

        Args:
            begin_micro_batch: called with the number of a micro-batch before its forward pass.
            units: the units of the whole step, by which the summed loss is divided.

        Returns:
            The loss of each micro-batch, detached.
        """
        ...

    def forward_only(
        self, model: Any, forward: Forward[HeadResult], batches: Sequence[Any]
    ) -> list[Mapping[str, np.ndarray]]:
        """Run batches forward without gradients and return the named tensors of each; ranks that share the model have
        the same."""
        ...

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Make every gradient the sum over all ranks that hold a part of it; called once, after the micro-batches.

        Returns:
            What this rank updates, each with its gradient, perhaps zeros: the parameters, or its shards of them.
        """
        ...

    def global_norm(self, updated: Sequence[Tensor]) -> Tensor:
        """Return the norm of the gradients of the whole model, 0-d; the same on every rank.

        Args:
            updated: what `reduce_gradients` has returned.
        """
        ...

    def all_finite(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether every gradient of this rank's micro-batches is finite, on all ranks that share them."""
        ...

    def after_update(self) -> None:
        """Run the collectives that follow the update of all ranks."""
        ...


def forward_backward_no_pipelining(
    model: Any, loss: LossFunction, batches: Sequence[Any], begin_micro_batch: Callable[[int], None], units: float
) -> list[MicroBatchLoss]:
    """Run one micro-batch after another, forward and backward; see `Ranks.forward_backward`."""
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
    model: Any, forward: Forward[HeadResult], batches: Sequence[Any]
) -> list[Mapping[str, np.ndarray]]:
    """Run one batch after another; see `Ranks.forward_only`."""
    with paddle.no_grad():
        results = (forward(model, batch) for batch in batches)
        return [{name: value.numpy() for name, value in result.named_tensors().items()} for result in results]


class SingleProcess:
    """The ranks of a run in one process: every collective returns its own input."""

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
        """Do nothing: there is no other rank."""


SINGLE_PROCESS: Ranks = SingleProcess()

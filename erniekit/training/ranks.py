"""What an optimizer step asks of the other ranks of the run, so that one step serves every layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from paddle import Tensor

from erniekit.training.gradients import global_norm
from erniekit.training.objectives import LossOfBatch, MicroLoss


class Ranks(Protocol):
    """The ranks among which a run is divided, as one of them sees them: `SINGLE` here, all others in `parallel/`.

    Attributes:
        is_first: whether this is the rank that writes and prints for all.
    """

    @property
    def is_first(self) -> bool: ...

    def sum(self, values: np.ndarray) -> np.ndarray:
        """The float64 sum of figures over the ranks that work on different data; the same on every rank."""
        ...

    def run(
        self,
        model: Any,
        loss: LossOfBatch,
        batches: Sequence[Any],
        begin: Callable[[int], None],
        units: float,
    ) -> list[MicroLoss]:
        """Forward and backward of this rank's micro-batches; gradients of `loss_sum / units` add up in the parameters.

        Args:
            begin: called with the number of a micro-batch before its forward pass.
            units: what the summed loss is divided by, of the whole step.

        Returns:
            What each micro-batch gave, detached.
        """
        ...

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Make every gradient the sum over all ranks that hold a part of it; called once, after the micro-batches."""
        ...

    def global_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """The norm of the gradients of the whole model, 0-d fp32, every value counted once; the same on every rank."""
        ...


def run_in_turn(
    model: Any, loss: LossOfBatch, batches: Sequence[Any], begin: Callable[[int], None], units: float
) -> list[MicroLoss]:
    """One micro-batch after another, forward and backward; see `Ranks.run`."""
    parts = []
    for index, batch in enumerate(batches):
        begin(index)
        part = loss(model, batch)
        (part.loss_sum / units).backward()
        parts.append(MicroLoss(part.loss_sum.detach(), {name: value.detach() for name, value in part.sums.items()}))
    return parts


class _Single:
    """One process: everything is here already."""

    is_first = True

    def sum(self, values: np.ndarray) -> np.ndarray:
        return values

    run = staticmethod(run_in_turn)

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Nothing is elsewhere."""

    def global_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        return global_norm(parameters)


SINGLE: Ranks = _Single()

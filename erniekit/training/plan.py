"""What training and evaluation ask of a data plan, so that they serve plans of samples, of pairs and of tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol


class Plan(Protocol):
    """Which micro-batches make which step; a function of the step alone. Batches are what the objective takes."""

    def micro_batches(self, step: int, /) -> Sequence[Any]: ...
    def steps_in_epoch(self, epoch: int, /) -> int: ...
    def epoch_of(self, step: int, /) -> float: ...


class EvaluationPlan(Plan, Protocol):
    """A plan whose steps are one micro-batch each, and each of one source; ranks may divide them.

    Attributes:
        dp_rank, dp_world_size: this rank among those that divide the steps.
    """

    @property
    def dp_rank(self) -> int: ...
    @property
    def dp_world_size(self) -> int: ...

    def local_steps(self, stop: int, /) -> Iterator[tuple[int, Any]]:
        """This rank's part of the steps below `stop`: numbers and micro-batches, equally many on every rank. A
        micro-batch without samples fills up."""
        ...

    def source_of(self, step: int, /) -> str: ...

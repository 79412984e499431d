"""Read every held-out sample once, file by file, so that each file has its own metrics."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

from erniekit.data.batch import Batch
from erniekit.data.dataset import Dataset
from erniekit.data.sampler import BatchSource, StepPlan, local_batches, takes_recordings
from erniekit.errors import DataError


class EvaluationPlan:
    """The plans of all files, one after another; no row has samples of two files. A step is one micro-batch.

    Steps are numbered over the whole evaluation; `local_steps` gives those of this rank.

    Attributes:
        dataset: the samples of all files.
        sources: the names of the files, in order; files without samples of the requested lengths are left out.
        dp_rank, dp_world_size: this rank among those that divide the steps.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        batch_source: BatchSource = local_batches,
        **options: Any,
    ) -> None:
        """Take `batch_source` and `options`, how samples share rows and batches, as StepPlan does."""
        self.dataset = dataset
        self._batch_source = batch_source
        self.dp_rank, self.dp_world_size = dp_rank, dp_world_size
        shortest, longest = options.get("shortest", 1), options.get("longest") or dataset.lengths.max(initial=0)
        eligible = (dataset.lengths >= shortest) & (dataset.lengths <= longest)
        eligible &= takes_recordings(dataset, options.get("batch_seconds", 0.0))
        eligible_sources = dataset.source_of[eligible]
        numbers = [number for number in range(len(dataset.sources)) if (eligible_sources == number).any()]
        if not numbers:
            limits = "shorter than min_sample_len or longer than max_sample_len or batch_seconds"
            raise DataError(f"no sample to evaluate; all are {limits}")
        self.sources = source_names([str(dataset.sources[number].path) for number in numbers])
        self._plans = [StepPlan(dataset, **options, accumulation=1, shuffle=False, source=number) for number in numbers]
        self._first = [0]
        for plan in self._plans:
            self._first.append(self._first[-1] + plan.steps_in_epoch(0))

    def steps_in_epoch(self, epoch: int) -> int:
        del epoch
        return self._first[-1]

    def epoch_of(self, step: int) -> float:
        return step / self._first[-1]

    def micro_batches(self, step: int) -> list[Batch]:
        source_index = self._source_index(step)
        return self._batch_source(lambda: self._plans[source_index].read(step - self._first[source_index]))

    def local_steps(self, stop: int) -> Iterator[tuple[int, Batch]]:
        """Yield this rank's steps below `stop`, each with its number: r, r + dp_world_size, ...

        Every rank gets the same number of them, because ranks that share a model run it together. A rank for which
        there is no step left gets the number of the last step and a micro-batch of padding.
        """
        for first in range(0, stop, self.dp_world_size):
            step = first + self.dp_rank
            if step < stop:
                yield step, self.micro_batches(step)[0]
            else:
                yield stop - 1, self._plans[0].padding()

    def source_of(self, step: int) -> str:
        """Return the name of the file that a step reads."""
        return self.sources[self._source_index(step)]

    def _source_index(self, step: int) -> int:
        return bisect_right(self._first, step) - 1


def source_names(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the paths, with a number where a path is repeated."""
    names: list[str] = []
    for path in paths:
        count = sum(name == path or name.startswith(f"{path} (") for name in names)
        names.append(f"{path} ({count + 1})" if count else path)
    return tuple(names)

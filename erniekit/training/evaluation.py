"""Evaluation: token-weighted loss and metrics over a data plan, as running sums."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
from paddle.nn import Layer

from erniekit.errors import TrainingError
from erniekit.model.bf16 import weights_stay
from erniekit.training.collectives import SINGLE_PROCESS, Ranks
from erniekit.training.metrics import Totals
from erniekit.training.objectives.objective import Objective
from erniekit.training.objectives.reference import eval_mode

# The interface of data plans for training and evaluation: plans of samples, of pairs and of tests implement it.


class Plan(Protocol):
    """The micro-batches of each step, as a function of the step alone. The objective defines the type of a batch."""

    def micro_batches(self, step: int, /) -> Sequence[Any]: ...
    def steps_in_epoch(self, epoch: int, /) -> int: ...
    def epoch_of(self, step: int, /) -> float: ...


class EvaluationPlan(Plan, Protocol):
    """A plan whose steps are one micro-batch of one source each; data-parallel ranks share the steps.

    Attributes:
        dp_rank, dp_world_size: this rank among the data-parallel ranks.
    """

    @property
    def dp_rank(self) -> int: ...
    @property
    def dp_world_size(self) -> int: ...

    def local_steps(self, stop: int, /) -> Iterator[tuple[int, Any]]:
        """Yield this rank's steps below `stop` with their micro-batches, equally many on every rank.

        Micro-batches without samples fill up the last steps.
        """
        ...

    def source_of(self, step: int, /) -> str: ...


@dataclass(frozen=True)
class EvaluationResult:
    """Means over all target tokens of the batches that were run."""

    loss: float | None  # None where there is none, as of answers that are scored
    perplexity: float | None  # exp(loss); infinite if that overflows, None if it is meaningless
    metrics: dict[str, float]  # per unit, for example token_accuracy
    units: int
    tokens: int
    batches: int
    batches_available: int
    seconds: float
    sources: Mapping[str, EvaluationResult] = field(default_factory=dict)  # of each source, if there are several

    def record(self) -> dict[str, Any]:
        """Return the metrics under their names in logs and result files."""
        named = {"eval_loss": self.loss, "eval_perplexity": self.perplexity}
        named |= {f"eval_{name}": value for name, value in self.metrics.items()}
        named |= {"eval_batches": self.batches, "eval_batches_available": self.batches_available}
        named |= {"eval_units": self.units, "eval_seconds": round(self.seconds, 3)}
        return {name: value for name, value in named.items() if value is not None}

    def results(self) -> dict[str, Any]:
        """Return `record()`, and with several sources also `eval_sources` with the record of each."""
        sources = {name: result.record() for name, result in self.sources.items()}
        return self.record() | ({"eval_sources": sources} if sources else {})


class ExtraMetrics(NamedTuple):
    """Metrics other than the loss's, such as scores of answers."""

    overall: Mapping[str, float]
    by_source: Mapping[str, Mapping[str, float]]


def evaluate(
    model: Layer,
    plan: EvaluationPlan,
    objective: Objective,
    *,
    max_batches: int = 0,
    describe_sample: Callable[[int], str] = str,
    extra_metrics: Callable[[Any], ExtraMetrics] | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> EvaluationResult:
    """Run the first epoch of `plan` without dropout and without gradients; the model's mode is restored afterwards.

    Args:
        plan: every step is one micro-batch of one source; data-parallel ranks share the steps.
        max_batches: stop after this many micro-batches, over all ranks; 0 or less runs all.
        extra_metrics: called with the model; its metrics are added to the objective's.
        ranks: the ranks that share the model and the steps; the result is the same on all.

    Raises:
        TrainingError: a loss is not finite; names the samples of the first such batch. Raised on all ranks.
    """
    started = time.perf_counter()
    available = plan.steps_in_epoch(0)
    read = min(available, max_batches) if max_batches > 0 else available
    sources = Counter(plan.source_of(step) for step in range(read))
    with eval_mode(model):
        totals_by_source, not_finite = _evaluate_batches(model, plan, objective, read, list(sources), ranks)
    first = _first_not_finite(not_finite, plan, ranks)
    if first is not None:
        samples = ", ".join(describe_sample(sample) for row in plan.micro_batches(first)[0].samples for sample in row)
        raise TrainingError(f"the evaluation loss is not finite in batch {first}, samples {samples}")
    overall = Totals()
    for totals in totals_by_source.values():
        overall.add(totals)
    with weights_stay():
        extra = extra_metrics(model) if extra_metrics else ExtraMetrics({}, {})
    result = _result(overall, extra.overall, objective, read, available, time.perf_counter() - started)
    all_sources = Counter(plan.source_of(step) for step in range(available))
    if len(all_sources) < 2:
        return result
    by_source = {
        name: _result(
            totals, extra.by_source.get(name, {}), objective, sources[name], all_sources[name], totals.seconds
        )
        for name, totals in totals_by_source.items()
    }
    return replace(result, sources=by_source)


def _evaluate_batches(
    model: Layer, plan: EvaluationPlan, objective: Objective, read: int, sources: Sequence[str], ranks: Ranks
) -> tuple[dict[str, Totals], int | None]:
    """Return the totals of each source over all ranks, and this rank's first step whose loss is not finite."""
    totals_by_source = {source: Totals() for source in sources}
    not_finite = None
    names: Sequence[str] = ()
    loss = objective.loss_for(model, (batch for _, batch in plan.local_steps(read)), ranks)
    steps = iter(plan.local_steps(read))
    with weights_stay():
        while some := list(islice(steps, ranks.num_forward_batches)):
            before = time.perf_counter()
            found = ranks.forward_only(model, loss, [objective.part_for_loss(batch) for _, batch in some])
            seconds = (time.perf_counter() - before) / len(some)
            for (step, batch), metrics in zip(some, found, strict=True):
                sums = {name: float(value) for name, value in metrics.items()}
                loss_sum = sums.pop("loss_sum")
                names = sorted(sums)
                totals_by_source[plan.source_of(step)].add(
                    Totals(loss_sum, objective.units(batch), sums, batch.token_count, seconds)
                )
                if not math.isfinite(loss_sum) and not_finite is None:
                    not_finite = step
            if not_finite is not None and plan.dp_world_size == 1:
                break  # with several ranks, those that share the model continue, and so must this one
    own = [
        [totals.loss_sum, totals.units, totals.tokens, *(totals.sums.get(name, 0.0) for name in names)]
        for totals in totals_by_source.values()
    ]
    for totals, (loss_sum, units, tokens, *sums) in zip(
        totals_by_source.values(), ranks.sum(np.array(own)).tolist(), strict=True
    ):
        totals.loss_sum, totals.units, totals.tokens = loss_sum, units, int(tokens)
        totals.sums = dict(zip(names, sums, strict=True))
    return totals_by_source, not_finite


def _first_not_finite(step: int | None, plan: EvaluationPlan, ranks: Ranks) -> int | None:
    """Return the first of the steps that the ranks report, at most one each."""
    marked = np.zeros(plan.dp_world_size)
    if step is not None:
        marked[plan.dp_rank] = step + 1
    return min((int(number) - 1 for number in ranks.sum(marked) if number), default=None)


def _result(
    totals: Totals, extra: Mapping[str, float], objective: Objective, batches: int, available: int, seconds: float
) -> EvaluationResult:
    return EvaluationResult(
        loss=totals.loss,
        perplexity=_perplexity(totals.loss) if objective.perplexity else None,
        metrics={**totals.metrics, **extra},
        units=int(totals.units),
        tokens=totals.tokens,
        batches=batches,
        batches_available=available,
        seconds=seconds,
    )


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf

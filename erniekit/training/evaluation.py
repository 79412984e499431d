"""Evaluation: the token-weighted loss over a plan, with running sums only."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import paddle
from paddle.nn import Layer

from erniekit.errors import TrainingError
from erniekit.training.objectives import Objective
from erniekit.training.plan import EvaluationPlan
from erniekit.training.totals import Totals


@dataclass(frozen=True)
class EvaluationResult:
    """Means over all target tokens of the batches that were run."""

    loss: float
    perplexity: float | None  # exp(loss); infinite when that overflows, None where it means nothing
    figures: dict[str, float]  # per unit, for example token_accuracy
    units: int
    tokens: int
    batches: int
    batches_available: int
    seconds: float
    sources: Mapping[str, EvaluationResult] = field(default_factory=dict)  # of each source, where there are several

    def record(self) -> dict[str, Any]:
        """The figures under the names they have in logs and result files."""
        named = {"eval_loss": self.loss, "eval_perplexity": self.perplexity}
        named |= {f"eval_{name}": value for name, value in self.figures.items()}
        named |= {"eval_batches": self.batches, "eval_batches_available": self.batches_available}
        named |= {"eval_units": self.units, "eval_seconds": round(self.seconds, 3)}
        return {name: value for name, value in named.items() if value is not None}

    def results(self) -> dict[str, Any]:
        """`record()`, and where there are several sources `eval_sources` with the record of each under its name."""
        sources = {name: result.record() for name, result in self.sources.items()}
        return self.record() | ({"eval_sources": sources} if sources else {})


class FurtherFigures(NamedTuple):
    """Figures that no loss gives, such as scores of answers."""

    all: Mapping[str, float]
    by_source: Mapping[str, Mapping[str, float]]


def evaluate(
    model: Layer,
    plan: EvaluationPlan,
    objective: Objective,
    *,
    max_batches: int = 0,
    describe_sample: Callable[[int], str] = str,
    further_figures: Callable[[Any], FurtherFigures] | None = None,
) -> EvaluationResult:
    """Run the first epoch of `plan` without dropout and without gradients; the model's mode is put back afterwards.

    Args:
        plan: every step is one micro-batch of one source.
        max_batches: stop after this many micro-batches; 0 or less runs all.
        further_figures: called with the model; what it gives stands among the objective's figures.

    Raises:
        TrainingError: a loss is not finite; names the samples of the batch.
    """
    started = time.perf_counter()
    available = plan.steps_in_epoch(0)
    read = min(available, max_batches) if max_batches > 0 else available
    parts: dict[str, _Part] = {}
    was_training = model.training
    model.eval()
    with paddle.no_grad():
        loss = objective.loss_for(model, (batch for _, batch in _batches(plan, read)))
        for number, (source, batch) in enumerate(_batches(plan, read)):
            part = parts.setdefault(source, _Part())
            before = time.perf_counter()
            micro_loss = loss(model, batch)
            loss_sum = float(micro_loss.loss_sum)
            if not math.isfinite(loss_sum):
                samples = ", ".join(describe_sample(sample) for row in batch.samples for sample in row)
                raise TrainingError(
                    f"the evaluation loss is not finite ({loss_sum}) in batch {number}, samples {samples}"
                )
            sums = {name: float(value) for name, value in micro_loss.sums.items()}
            part.totals.add(Totals(loss_sum, objective.units(batch), sums, batch.token_count))
            part.batches += 1
            part.seconds += time.perf_counter() - before
    if was_training:
        model.train()
    whole = Totals()
    for part in parts.values():
        whole.add(part.totals)
    further = further_figures(model) if further_figures else FurtherFigures({}, {})
    steps_of = Counter(plan.source_of(step) for step in range(available))
    result = _result(whole, further.all, objective, read, available, time.perf_counter() - started)
    if len(steps_of) < 2:
        return result
    sources = {
        name: _result(
            part.totals, further.by_source.get(name, {}), objective, part.batches, steps_of[name], part.seconds
        )
        for name, part in parts.items()
    }
    return replace(result, sources=sources)


@dataclass
class _Part:
    """What was run of one source."""

    totals: Totals = field(default_factory=Totals)
    batches: int = 0
    seconds: float = 0.0


def _result(
    totals: Totals, further: Mapping[str, float], objective: Objective, batches: int, available: int, seconds: float
) -> EvaluationResult:
    return EvaluationResult(
        loss=totals.loss,
        perplexity=_perplexity(totals.loss) if objective.perplexity else None,
        figures={**totals.figures, **further},
        units=int(totals.units),
        tokens=totals.tokens,
        batches=batches,
        batches_available=available,
        seconds=seconds,
    )


def _batches(plan: EvaluationPlan, steps: int) -> Iterator[tuple[str, Any]]:
    for step in range(steps):
        for batch in plan.micro_batches(step):
            yield plan.source_of(step), batch


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf

"""Evaluation: the token-weighted loss over a plan, with running sums only."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.nn import Layer

from erniekit.errors import TrainingError
from erniekit.training.objectives import Objective
from erniekit.training.plan import Plan
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

    def record(self) -> dict[str, Any]:
        """The figures under the names they have in logs and result files."""
        named = {"eval_loss": self.loss, "eval_perplexity": self.perplexity}
        named |= {f"eval_{name}": value for name, value in self.figures.items()}
        named |= {"eval_batches": self.batches, "eval_batches_available": self.batches_available}
        named |= {"eval_units": self.units, "eval_seconds": round(self.seconds, 3)}
        return {name: value for name, value in named.items() if value is not None}


def evaluate(
    model: Layer,
    plan: Plan,
    objective: Objective,
    *,
    max_batches: int = 0,
    describe_sample: Callable[[int], str] = str,
) -> EvaluationResult:
    """Run the first epoch of `plan` without dropout and without gradients; the model's mode is put back afterwards.

    Args:
        plan: without accumulation: every step is one micro-batch.
        max_batches: stop after this many micro-batches; 0 or less runs all.

    Raises:
        TrainingError: a loss is not finite; names the samples of the batch.
    """
    started = time.perf_counter()
    available = plan.steps_in_epoch(0)
    totals, run = Totals(), 0
    was_training = model.training
    model.eval()
    read = min(available, max_batches) if max_batches > 0 else available
    with paddle.no_grad():
        loss = objective.loss_for(model, _batches(plan, read))
        for batch in _batches(plan, read):
            part = loss(model, batch)
            loss_sum = float(part.loss_sum)
            if not math.isfinite(loss_sum):
                samples = ", ".join(describe_sample(sample) for row in batch.samples for sample in row)
                raise TrainingError(f"the evaluation loss is not finite ({loss_sum}) in batch {run}, samples {samples}")
            sums = {name: float(value) for name, value in part.sums.items()}
            totals.add(Totals(loss_sum, objective.units(batch), sums, batch.token_count))
            run += 1
    if was_training:
        model.train()
    return EvaluationResult(
        loss=totals.loss,
        perplexity=_perplexity(totals.loss) if objective.perplexity else None,
        figures=totals.figures,
        units=int(totals.units),
        tokens=totals.tokens,
        batches=run,
        batches_available=available,
        seconds=time.perf_counter() - started,
    )


def _batches(plan: Plan, steps: int) -> Iterator[Any]:
    for step in range(steps):
        yield from plan.micro_batches(step)


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf

"""How a run ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from erniekit.training.best_model import BestSoFar
from erniekit.training.checkpoint import TrainerState
from erniekit.training.evaluation import EvaluationResult


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. All figures cover the whole run, including the part before a resume."""

    step: int
    epoch: float
    loss: float
    metrics: dict[str, float]
    tokens: int
    seconds: float  # in steps, without evaluation and saving
    evaluation: EvaluationResult | None  # the last one
    stopped_by: int | None  # the signal that ended the run early
    best: BestSoFar = field(default_factory=BestSoFar)

    @property
    def exit_code(self) -> int:
        """0, or what a shell expects of a program that a signal ended: 130 for SIGINT, 143 for SIGTERM."""
        return 0 if self.stopped_by is None else 128 + self.stopped_by

    def record(self) -> dict[str, Any]:
        """The figures under the names they have in `train_results.json`."""
        speed = self.tokens / self.seconds if self.seconds else 0.0
        return {
            "step": self.step,
            "epoch": round(self.epoch, 4),
            "train_loss": self.loss,
            **{f"train_{name}": value for name, value in self.metrics.items()},
            "train_tokens": self.tokens,
            "train_seconds": round(self.seconds, 3),
            "train_tokens_per_second": round(speed, 1),
            **self.best.record(),
        }


def result_of(state: TrainerState, evaluation: EvaluationResult | None, stopped_by: int | None) -> TrainResult:
    """The result of a run that ends in this state."""
    totals = state.whole_run
    return TrainResult(
        step=state.step,
        epoch=state.epoch,
        loss=totals.loss,
        metrics=totals.metrics,
        tokens=totals.tokens,
        seconds=totals.seconds,
        evaluation=evaluation,
        stopped_by=stopped_by,
        best=state.best,
    )

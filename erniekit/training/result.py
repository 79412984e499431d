"""How a run ended, and its figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from erniekit.training.checkpoint.state import TrainerState
from erniekit.training.early_stopping import BestSoFar
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
    audio_seconds: float = 0.0  # of recordings that were read

    @property
    def exit_code(self) -> int:
        """0, or what a shell expects of a program that a signal ended: SIGHUP 129, SIGINT 130, SIGTERM 143."""
        return 0 if self.stopped_by is None else 128 + self.stopped_by

    def record(self) -> dict[str, Any]:
        """The figures under the names they have in `train_results.json`."""
        speed, audio_speed = (
            amount / self.seconds if self.seconds else 0.0 for amount in (self.tokens, self.audio_seconds)
        )
        audio = {
            "train_audio_seconds": round(self.audio_seconds, 2),
            "train_audio_seconds_per_second": round(audio_speed, 1),
        }
        return {
            "step": self.step,
            "epoch": round(self.epoch, 4),
            "train_loss": self.loss,
            **{f"train_{name}": value for name, value in self.metrics.items()},
            "train_tokens": self.tokens,
            "train_seconds": round(self.seconds, 3),
            "train_tokens_per_second": round(speed, 1),
            **(audio if self.audio_seconds else {}),
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
        audio_seconds=totals.audio_seconds,
        evaluation=evaluation,
        stopped_by=stopped_by,
        best=state.best,
    )

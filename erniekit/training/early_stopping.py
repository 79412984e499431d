"""Track the best evaluation so far, and decide when to stop early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from erniekit.config.sections.evaluation import EvaluationParameters
from erniekit.errors import TrainingError


@dataclass
class BestSoFar:
    """Part of the trainer's state, so that a resumed run decides like an uninterrupted one.

    Attributes:
        step: of the best evaluation.
        value: its metric.
        without_progress: number of evaluations since the metric last improved by more than the threshold.
        metric: name of the metric.
        greater: whether a greater value is better.
    """

    step: int | None = None
    value: float | None = None
    without_progress: int = 0
    metric: str = "eval_loss"
    greater: bool = False

    def is_comparable(self, section: EvaluationParameters) -> bool:
        """Return whether its value has the metric and direction of the section."""
        return (self.metric, self.greater) == (section.metric_for_best_model, section.greater_is_better)

    def record(self) -> dict[str, Any]:
        """Return the values under their names in `train_results.json`; empty before the first evaluation."""
        return {} if self.step is None else {"best_step": self.step, f"best_{self.metric}": self.value}


def update_best(best: BestSoFar, record: Mapping[str, Any], step: int, section: EvaluationParameters) -> bool:
    """Take an evaluation into account.

    A best value of another metric, from before a run was resumed, is discarded.

    Args:
        record: metrics by name.

    Returns:
        Whether it is the best so far; NaN never is.

    Raises:
        TrainingError: the record lacks the metric.
    """
    name = section.metric_for_best_model
    if name not in record:
        raise TrainingError(
            f"metric_for_best_model: {name} is not a metric of this evaluation; it has {', '.join(record)}"
        )
    value = float(record[name])
    if not best.is_comparable(section):
        best.step, best.value, best.without_progress = None, None, 0
        best.metric, best.greater = name, section.greater_is_better
    sign = 1.0 if best.greater else -1.0
    gain = sign * (value - (-sign * math.inf if best.value is None else best.value))  # NaN if the value is NaN
    best.without_progress = 0 if gain > section.early_stopping_threshold else best.without_progress + 1
    if not gain > 0:  # also if it is NaN
        return False
    best.step, best.value = step, value
    return True


def out_of_patience(best: BestSoFar, section: EvaluationParameters) -> bool:
    """Return whether training should stop."""
    return best.is_comparable(section) and 0 < section.early_stopping_patience <= best.without_progress


def stop_reason(best: BestSoFar, section: EvaluationParameters) -> str:
    """Return the log line of a run that stops early."""
    by = f" by more than {section.early_stopping_threshold:g}" if section.early_stopping_threshold else ""
    found = "" if best.value is None else f"; its best is {best.value:.4g}, at step {best.step}"
    return f"stopping early: {best.metric} has not improved{by} in {best.without_progress} evaluations{found}"

"""Judging evaluations."""

from __future__ import annotations

import math

import pytest

from erniekit.config.sections.evaluation import EvaluationParameters
from erniekit.errors import TrainingError
from erniekit.training.early_stopping import BestSoFar, out_of_patience, stop_reason, update_best


def run(values, **settings):
    chosen = EvaluationParameters(metric_for_best_model="eval_x", **settings)
    best = BestSoFar()
    judged = [update_best(best, {"eval_x": value}, step, chosen) for step, value in enumerate(values, start=1)]
    return best, judged, out_of_patience(best, chosen)


def seen(best):
    return best.step, best.value, best.without_progress


def test_smaller_is_better():
    best, judged, stop = run([3.0, 2.0, 2.5, 2.0, 1.0], early_stopping_patience=3)
    assert judged == [True, True, False, False, True]
    assert seen(best) == (5, 1.0, 0) and not stop


def test_greater_is_better():
    best, judged, _ = run([0.1, 0.3, 0.2], greater_is_better=True)
    assert judged == [True, True, False] and seen(best) == (2, 0.3, 1)


def test_progress_below_the_threshold_makes_the_best_and_wears_patience():
    best, judged, stop = run([3.0, 2.95, 2.92], early_stopping_patience=2, early_stopping_threshold=0.1)
    assert judged == [True, True, True] and seen(best) == (3, 2.92, 2) and stop


def test_no_patience_never_stops():
    assert not run([1.0] * 50)[2]


@pytest.mark.parametrize("greater", [True, False])
def test_not_a_number_is_never_the_best(greater):
    best, judged, _ = run([1.0, math.nan, 1.0], greater_is_better=greater)
    assert judged == [True, False, False] and seen(best) == (1, 1.0, 2)


def test_a_first_value_that_is_not_a_number_does_not_stand_in_the_way():
    best, judged, _ = run([math.nan, 2.0, 3.0])
    assert judged == [False, True, False] and seen(best) == (2, 2.0, 1)


def test_an_infinite_value_is_worse_than_any_other():
    best, judged, _ = run([math.inf, math.inf, 3.0])
    assert judged[1:] == [False, True] and seen(best) == (3, 3.0, 0)


def test_values_of_another_metric_are_not_compared():
    """A run may be resumed with another metric: a loss of 0.5 says nothing of an accuracy of 0.4."""
    best, _, stop = run([0.5, 0.6, 0.7], early_stopping_patience=2)
    assert stop
    other = EvaluationParameters(metric_for_best_model="eval_y", greater_is_better=True, early_stopping_patience=2)
    assert not out_of_patience(best, other)
    assert update_best(best, {"eval_y": 0.4}, 4, other)
    assert seen(best) == (4, 0.4, 0)
    assert not update_best(best, {"eval_y": 0.3}, 5, other) and seen(best) == (4, 0.4, 1)


def test_a_figure_that_is_not_there_is_told():
    with pytest.raises(TrainingError, match="eval_x is not a metric of this evaluation; it has eval_loss"):
        update_best(BestSoFar(), {"eval_loss": 1.0}, 1, EvaluationParameters(metric_for_best_model="eval_x"))


def test_the_threshold_is_told():
    best = BestSoFar(step=3, value=0.25, without_progress=2, metric="eval_x")
    told = "stopping early: eval_x has not improved{} in 2 evaluations; its best is 0.25, at step 3"
    assert stop_reason(best, EvaluationParameters()) == told.format("")
    assert stop_reason(best, EvaluationParameters(early_stopping_threshold=0.1)) == told.format(" by more than 0.1")

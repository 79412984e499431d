"""Warnings of runs that collapse."""

from __future__ import annotations

from typing import Any

import pytest

from erniekit.rollouts.collapse import CollapseWarnings

HEALTHY = {"entropy": 1.0, "completion_len": 20.0, "completions_cut": 0.1, "groups_equal": 0.3, "grad_norm": 1.0}


def warnings_of(caplog: pytest.LogCaptureFixture, **later: float) -> list[str]:
    watching = CollapseWarnings()
    with caplog.at_level("WARNING", logger="erniekit"):
        for step in range(60):
            record: dict[str, Any] = {"step": step + 1, **HEALTHY, **(later if step >= 30 else {})}
            watching.on_step(record)
    return [message.getMessage() for message in caplog.records]


@pytest.fixture(autouse=True)
def propagate(monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    monkeypatch.setattr(logging.getLogger("erniekit"), "propagate", True)


def test_a_healthy_run_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(
    ("later", "told"),
    [
        ({"entropy": 0.01}, "the entropy has fallen from 1 to"),
        ({"completion_len": 200.0}, "answers have"),
        ({"completion_len": 2.0}, "answers have"),
        ({"completions_cut": 0.9}, "have no end within max_completion_len"),
        ({"groups_equal": 1.0}, "all rewards are equal"),
        ({"grad_norm": 0.0}, "the gradient of the last 10 steps is 0"),
    ],
)
def test_each_collapse_is_told_once(caplog: pytest.LogCaptureFixture, later: dict[str, float], told: str) -> None:
    (message,) = warnings_of(caplog, **later)
    assert told in message and message.startswith("step ")

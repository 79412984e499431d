"""Schedules: the recorded values of transformers, and what must hold for any settings."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.config.sections.training import TrainingParameters
from erniekit.errors import ConfigurationError
from erniekit.training.optim.schedules import check_schedule_fits, dropout_scale, learning_rate, warmup_steps_of

from .optimizer_case import RECORDED_SCHEDULES, SCHEDULES, learning_rates, schedule


@pytest.mark.parametrize("name", SCHEDULES)
def test_equal_to_transformers(name: str) -> None:
    recorded = json.loads(RECORDED_SCHEDULES.read_text())["learning_rates"][name]
    assert learning_rates(SCHEDULES[name]) == pytest.approx(recorded, rel=1e-12, abs=1e-20)


@given(
    kind=st.sampled_from(["linear", "cosine", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt", "wsd"]),
    total=st.integers(1, 200),
    warmup=st.integers(0, 250),
    decay=st.integers(0, 250),
    shape=st.sampled_from(["linear", "cosine", "1-sqrt"]),
    step=st.integers(0, 300),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_stays_between_zero_and_the_peak(kind: str, total: int, warmup: int, decay: int, shape: str, step: int) -> None:
    section = schedule(kind, 0.1, total, warmup_steps=warmup, min_lr=0.01, decay_steps=decay, wsd_decay_type=shape)
    assert 0.0 <= learning_rate(step, section, total) <= 0.1 + 1e-12


def test_the_peak_is_reached_when_warm_up_ends_and_the_floor_at_the_end() -> None:
    for section in SCHEDULES.values():
        peak = learning_rate(warmup_steps_of(section, section.max_steps), section, section.max_steps)
        assert peak == pytest.approx(section.learning_rate)
    assert learning_rate(30, SCHEDULES["linear"], 30) == 0.0
    assert learning_rate(30, SCHEDULES["cosine"], 30) == pytest.approx(3e-5)
    assert learning_rate(30, SCHEDULES["polynomial"], 30) == pytest.approx(1e-5)
    assert learning_rate(30, SCHEDULES["wsd linear"], 30) == pytest.approx(1e-4)


def test_wsd_is_flat_between_warm_up_and_decay() -> None:
    section = SCHEDULES["wsd cosine"]
    assert {learning_rate(step, section, 30) for step in range(5, 21)} == {section.learning_rate}
    assert learning_rate(21, section, 30) < section.learning_rate


@pytest.mark.proves("lr_scheduler_type", "warmup_steps", "decay_steps")
def test_a_schedule_that_is_longer_than_the_run_is_refused() -> None:
    fits = TrainingParameters(lr_scheduler_type="wsd", warmup_steps=3, decay_steps=4)
    check_schedule_fits(fits, 7)
    check_schedule_fits(replace(fits, lr_scheduler_type="linear"), 6)
    for longer, told in (({"warmup_steps": 4}, (4, 4)), ({"decay_steps": 5}, (3, 5))):
        with pytest.raises(ConfigurationError, match="warmup_steps {} . decay_steps {} exceed the 7 ".format(*told)):
            check_schedule_fits(replace(fits, **longer), 7)


def test_unknown_schedule() -> None:
    with pytest.raises(ValueError, match="unknown schedule 'step'"):
        learning_rate(1, schedule("step", 0.1, 10), 10)


def test_dropout_warm_up() -> None:
    assert [dropout_scale(step, 4) for step in range(6)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert dropout_scale(0, 0) == 1.0

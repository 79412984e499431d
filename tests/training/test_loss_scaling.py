"""The loss scale of float16: it grows, backs off, skips and ends, and otherwise changes nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddle.autograd import PyLayer

from erniekit.config.sections.training import TrainingParameters
from erniekit.errors import TrainingError
from erniekit.training.checkpoint.resume import Start, open_output_folder
from erniekit.training.gradients import MAX_SCALE, LossScale
from erniekit.training.objectives.objective import MicroBatchLoss, Objective
from erniekit.training.optim.adamw import build_optimizer
from erniekit.training.step import StepResult, train_step

from .fakes import FAKE_OBJECTIVE, FakeBatch, FakeLoss, FakeModel, FakePlan, Recorder, fake_trainer
from .test_resume import KillAt, KilledError

FRESH = Start(None)


class _InFloat16(PyLayer):
    """The value unchanged; its gradient as float16 would have it: infinite where it is too large."""

    @staticmethod
    def forward(ctx, value):  # type: ignore[no-untyped-def]
        return paddle.assign(value)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        with np.errstate(over="ignore"):
            return paddle.to_tensor(grad.numpy().astype(np.float16).astype(np.float32))


def overflowing(factor: float) -> Objective:
    """The fake objective; the gradient of every loss passes float16 times `factor`, and overflows from 65,504 on."""

    def loss(model: FakeModel, batch: FakeBatch) -> MicroBatchLoss:
        part = FAKE_OBJECTIVE.loss(model, batch)
        return MicroBatchLoss(_InFloat16.apply(part.loss_sum / factor) * factor, part.metric_sums)

    return Objective(FakeLoss(loss), "target tokens")


def one_step(objective: Objective, scale: LossScale | None) -> tuple[StepResult, dict[str, np.ndarray]]:
    model, plan = FakeModel(), FakePlan()
    optimizer = build_optimizer(model.named, TrainingParameters(weight_decay=0.1))
    result = train_step(
        model,
        list(model.named.values()),
        optimizer,
        objective,
        plan.micro_batches(0),
        step=0,
        learning_rate=0.01,
        max_grad_norm=0.5,
        loss_scale=scale,
    )
    assert model.named["model.norm.weight"].grad is None or not model.named["model.norm.weight"].grad.numpy().any()
    return result, model.arrays()


def test_a_power_of_two_changes_no_bit_of_an_update() -> None:
    plain, expected = one_step(FAKE_OBJECTIVE, None)
    scale = LossScale(2.0**13)
    result, weights = one_step(FAKE_OBJECTIVE, scale)
    assert result.updated and not result.overflowed
    assert (result.totals.loss, result.grad_norm) == (plain.totals.loss, plain.grad_norm)
    for name, value in expected.items():
        np.testing.assert_array_equal(weights[name], value, err_msg=name)
    assert (scale.scale, scale.finite_steps) == (2.0**13, 1)


def test_an_overflow_skips_the_update_and_halves_the_scale() -> None:
    scale = LossScale(2.0**20, finite_steps=7)
    result, weights = one_step(overflowing(1.0), scale)
    assert result.overflowed and not result.updated
    for name, value in FakeModel().arrays().items():
        np.testing.assert_array_equal(weights[name], value, err_msg=name)
    assert (scale.scale, scale.finite_steps) == (2.0**19, 0)


def test_small_gradients_survive_only_with_a_scale() -> None:
    """Of a loss divided by 1e9 float16 keeps no gradient; 2^24 times that it keeps."""
    tiny = overflowing(1e-9)
    assert one_step(tiny, None)[0].grad_norm == 0
    exact = one_step(FAKE_OBJECTIVE, None)[0].grad_norm
    assert one_step(tiny, LossScale(2.0**24))[0].grad_norm == pytest.approx(exact, rel=2e-2)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5), st.integers(0, 6))
def test_growth_and_back_off(finite: list[bool], interval: int, exponent: int) -> None:
    scale = LossScale(2.0**exponent, growth_interval=interval)
    expected, in_a_row = exponent, 0
    for good in finite:
        if good:
            scale.succeed()
            in_a_row += 1
            if in_a_row == interval:
                expected, in_a_row = min(expected + 1, 24), 0
        elif expected == 0:
            assert not scale.back_off()
        else:
            assert scale.back_off()
            expected, in_a_row = expected - 1, 0
        assert (scale.scale, scale.finite_steps) == (2.0**expected, in_a_row)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.floats(2.0**-20, 2.0**40),
    st.lists(st.booleans(), max_size=60),
    st.integers(1, 3),
)
def test_any_first_scale_stays_in_bounds_and_is_remembered(first: float, finite: list[bool], interval: int) -> None:
    scale = LossScale(first, growth_interval=interval)
    for good in finite:
        before = scale.scale
        if good:
            scale.succeed()
            assert before <= scale.scale <= 2 * before
        else:
            assert scale.back_off() == (scale.scale < before) == (before > scale.floor)
        assert min(first, scale.floor) <= scale.scale <= max(first, MAX_SCALE)
        assert 0 <= scale.finite_steps < interval
        assert LossScale(**json.loads(json.dumps(asdict(scale)))) == scale


def test_a_run_finds_a_scale_that_fits_and_says_so(tmp_path: Path, logged: list[str]) -> None:
    recorder = Recorder()
    trainer = fake_trainer(tmp_path, objective=overflowing(1.0), initial_loss_scale=2.0**20, callbacks=[recorder])
    result = trainer.fit(FRESH)
    skipped = [line for line in logged if "overflow" in line]
    assert result.step == 9
    assert 0 < len(skipped) < 9 and len(recorder.steps) == 9 - len(skipped)
    assert skipped[0] == (
        "step 1: skipped, a gradient overflows at the loss scale 1,048,576; the next step has 524,288"
    )
    assert trainer.state.loss_scale is not None
    assert trainer.state.loss_scale.scale == 2.0 ** (20 - len(skipped))
    assert np.isfinite(result.loss)


def test_the_floor_ends_the_run_with_advice(tmp_path: Path) -> None:
    trainer = fake_trainer(tmp_path, objective=overflowing(1e9), initial_loss_scale=4.0)
    with pytest.raises(TrainingError) as caught:
        trainer.fit(FRESH)
    message = str(caught.value)
    assert "step 3: the gradient norm is not finite even at the loss scale 1" in message
    assert "micro-batch 0: " in message and "bf16: true" in message


def test_a_floor_above_1_skips_until_too_many_overflow_in_a_row(tmp_path: Path, logged: list[str]) -> None:
    parts = {"objective": overflowing(1e9), "initial_loss_scale": 32.0, "loss_scale_bounds": (16.0, 64.0)}
    with pytest.raises(TrainingError, match="step 21: the gradient norm is not finite even at the loss scale 16"):
        fake_trainer(tmp_path, total_steps=30, plan=FakePlan(120), **parts).fit(FRESH)
    assert logged[0] == "step 1: skipped, a gradient overflows at the loss scale 32; the next step has 16"
    assert logged[1] == (
        "warning: step 2: skipped, a gradient overflows at the loss scale 16, the lower bound (min_loss_scale): "
        "1 in a row, 20 end the run"
    )
    assert len([line for line in logged if "in a row" in line]) == 19


def test_overflows_at_the_floor_count_in_a_row_only() -> None:
    scale = LossScale(16.0, floor=16.0, ceiling=64.0, growth_interval=2)
    for _ in range(3):
        assert all(scale.back_off() for _ in range(19))
        scale.succeed()
        assert (scale.scale, scale.finite_steps, scale.overflows_at_floor) == (16.0, 1, 0)
    for _ in range(9):
        scale.succeed()
    assert scale.scale == 64.0  # the ceiling
    assert [scale.back_off() for _ in range(22)] == [True] * 21 + [False]


def test_a_resumed_run_has_the_bounds_of_its_own_configuration(tmp_path: Path) -> None:
    fake_trainer(tmp_path, total_steps=4, initial_loss_scale=2.0**20, save_strategy="steps", save_steps=2).fit(FRESH)
    with open_output_folder(tmp_path, resume_from_checkpoint=True, overwrite_output_dir=False) as start:
        resumed = fake_trainer(tmp_path, initial_loss_scale=2.0**8, loss_scale_bounds=(2.0**4, 2.0**10))
        resumed.fit(start)
    scale = resumed.state.loss_scale
    assert scale is not None and (scale.scale, scale.floor, scale.ceiling) == (2.0**10, 2.0**4, 2.0**10)


def test_a_resumed_run_goes_on_with_its_scale(tmp_path: Path) -> None:
    options = {"objective": overflowing(1.0), "initial_loss_scale": 2.0**20, "save_strategy": "steps", "save_steps": 2}
    whole = fake_trainer(tmp_path / "whole", **options)
    whole.fit(FRESH)
    with pytest.raises(KilledError):
        fake_trainer(tmp_path / "killed", callbacks=[KillAt(7)], **options).fit(FRESH)
    with open_output_folder(tmp_path / "killed", resume_from_checkpoint=True, overwrite_output_dir=False) as start:
        assert start.checkpoint is not None
        resumed = fake_trainer(tmp_path / "killed", **options)
        resumed.model.load(start.checkpoint)
        resumed.fit(start)
    stored = json.loads((start.checkpoint / "trainer_state.json").read_text())
    assert stored["loss_scale"]["scale"] < 2.0**20
    assert resumed.state.loss_scale == whole.state.loss_scale
    for name, value in whole.model.arrays().items():
        np.testing.assert_array_equal(resumed.model.arrays()[name], value, err_msg=name)

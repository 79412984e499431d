"""The loop: what happens when, what a run leaves behind, and how it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from paddle.autograd import PyLayer
from safetensors.numpy import load_file

from erniekit.environment import STOP_SIGNALS
from erniekit.errors import CheckpointError, TrainingError
from erniekit.manifest import problems
from erniekit.training.callbacks import Callback, TrainingRun
from erniekit.training.checkpoint.atomic_folder import checkpoint_folders, step_of
from erniekit.training.checkpoint.resume import Start, open_output_folder
from erniekit.training.optim.schedules import learning_rate
from erniekit.training.result import result_of
from erniekit.training.step import train_step
from erniekit.training.trainer import Trainer, is_due

from .fakes import PADDING, FakeBatch, FakeLoss, FakePlan, Recorder, fake_trainer, identity
from .test_resume import KillAt, KilledError
from .test_step import poisoned

FRESH = Start(None)
EVALUATION = FakePlan(4, batch_size=1, accumulation=1)


def steps_of(output_dir: Path) -> list[int]:
    return [step_of(folder) for folder in checkpoint_folders(output_dir)]


@pytest.mark.parametrize(
    ("strategy", "every", "steps"),
    [("steps", 2, [2, 4, 6, 7]), ("steps", 7, [7]), ("epoch", 2, [3, 6, 7]), ("no", 2, [])],
)
def test_when_logs_evaluations_and_checkpoints_happen(
    tmp_path: Path, strategy: str, every: int, steps: list[int]
) -> None:
    """Three steps make an epoch; the last step is always covered."""
    recorder = Recorder()
    trainer = fake_trainer(
        tmp_path,
        total_steps=7,
        callbacks=[recorder],
        evaluation_plan=EVALUATION,
        logging_strategy=strategy,
        logging_steps=every,
        evaluation_strategy=strategy,
        eval_steps=every,
        save_strategy=strategy,
        save_steps=every,
    )
    result = trainer.fit(FRESH)
    assert [record["step"] for record in recorder.steps] == [1, 2, 3, 4, 5, 6, 7]
    assert [record["step"] for record in recorder.logs] == steps
    assert [record["step"] for record in recorder.evaluations] == steps
    assert [step_of(folder) for folder in recorder.saved] == steps
    assert steps_of(tmp_path) == steps
    assert (result.step, result.exit_code) == (7, 0)


def test_due_without_an_interval() -> None:
    assert not is_due("steps", 0, 10, epoch_ended=True, last=False)


def test_the_logged_loss_is_token_weighted_since_the_last_log(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = fake_trainer(tmp_path, total_steps=6, callbacks=[recorder], logging_steps=3)
    result = trainer.fit(FRESH)
    plan = trainer.plan
    targets = [sum(batch.target_count for batch in plan.micro_batches(step)) for step in range(6)]
    assert len(set(targets)) > 1
    losses = [record["loss"] for record in recorder.steps]
    assert recorder.logs[0]["loss"] == pytest.approx(np.average(losses[:3], weights=targets[:3]))
    assert recorder.logs[1]["loss"] == pytest.approx(np.average(losses[3:], weights=targets[3:]))
    assert result.loss == pytest.approx(np.average(losses, weights=targets))
    rates = [learning_rate(step, trainer.config.training, trainer.total_steps) for step in range(6)]
    assert [record["learning_rate"] for record in recorder.steps] == rates
    assert recorder.logs[0].keys() == {
        "step", "epoch", "loss", "learning_rate", "grad_norm", "token_accuracy", "tokens"
    }  # fmt: skip


def test_training_learns(tmp_path: Path) -> None:
    recorder = Recorder()
    fake_trainer(tmp_path, total_steps=60, dropout=0.0, callbacks=[recorder], logging_steps=10).fit(FRESH)
    assert recorder.logs[-1]["loss"] < 0.7 * recorder.logs[0]["loss"]


def test_evaluating_does_not_change_training(tmp_path: Path) -> None:
    with_evaluation = fake_trainer(
        tmp_path / "a", evaluation_plan=EVALUATION, evaluation_strategy="steps", eval_steps=1
    )
    without = fake_trainer(tmp_path / "b")
    with_evaluation.fit(FRESH)
    without.fit(FRESH)
    for name, value in without.model.arrays().items():
        np.testing.assert_array_equal(with_evaluation.model.arrays()[name], value, err_msg=name)


def test_dropout_warm_up_reaches_the_model(tmp_path: Path) -> None:
    seen = []

    class Watch(Callback):
        def on_step(self, _record: dict) -> None:
            seen.append(trainer.model.randomness.dropout_scale)

    trainer = fake_trainer(tmp_path, total_steps=4, callbacks=[Watch()], dropout_warmup_steps=2)
    trainer.fit(FRESH)
    assert seen == [0.0, 0.5, 1.0, 1.0]


def test_what_a_run_leaves_behind(tmp_path: Path) -> None:
    trainer = fake_trainer(tmp_path, total_steps=3)
    trainer.fit(FRESH)
    assert problems(tmp_path, hashes=True) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "training_config.yaml",
    ]
    assert yaml.safe_load((tmp_path / "training_config.yaml").read_text()) == {"learning_rate": 0.05}


def judged_trainer(folder: Path, losses: list[float], *, start: int = 0, **options: object) -> Trainer:
    """A trainer that evaluates after every step, with these losses."""
    given = iter(losses[start:])
    trainer = fake_trainer(
        folder, total_steps=len(losses), evaluation_plan=EVALUATION, evaluation_strategy="steps", eval_steps=1,
        **{"save_strategy": "steps", "save_steps": 1, **options},
    )  # fmt: skip
    evaluate = trainer.evaluate
    trainer.evaluate = lambda: replace(evaluate(), loss=next(given))
    return trainer


def test_save_total_limit_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    judged_trainer(tmp_path, [3.0, 1.0, 2.0, 5.0, 4.0], save_total_limit=2).fit(FRESH)
    assert steps_of(tmp_path) == [2, 5]
    state = json.loads((tmp_path / "checkpoint-5" / "trainer_state.json").read_text())
    expected = {"step": 2, "value": 1.0, "without_progress": 3, "metric": "eval_loss", "greater": False}
    assert state["best"] == expected


def test_the_best_model_is_what_is_left(tmp_path: Path, logged: list[str]) -> None:
    options = {"load_best_model_at_end": True, "save_steps": 100, "save_total_limit": 1}
    after: dict[int, dict] = {}

    class Watch(Callback):
        def on_step(self, record: dict) -> None:
            after[record["step"]] = {name: array.copy() for name, array in trainer.model.arrays().items()}

    trainer = judged_trainer(tmp_path, [3.0, 1.0, 2.0, 5.0], callbacks=[Watch()], **options)
    trainer.fit(FRESH)
    assert steps_of(tmp_path) == [2, 4]  # saved because it was the best, and the last
    left = load_file(tmp_path / "model.safetensors")
    for name, array in after[2].items():
        np.testing.assert_array_equal(left[name], array)
    assert not (tmp_path / "optimizer.safetensors").exists()
    assert problems(tmp_path, hashes=True) == []
    assert "the model of step 2, where eval_loss was best (1)," in logged[-1]
    results = result_of(trainer.state, trainer.last_evaluation, stopped_by=None).record()
    assert (results["step"], results["best_step"], results["best_eval_loss"]) == (4, 2, 1.0)


def _change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "harm", [shutil.rmtree, lambda folder: _change_a_byte(folder / "model.safetensors")], ids=["gone", "damaged"]
)
def test_a_best_checkpoint_that_cannot_be_used_is_told(harm: Any, tmp_path: Path, logged: list[str]) -> None:
    class Harm(Callback):
        def on_step(self, record: dict) -> None:
            if record["step"] == 4:
                harm(tmp_path / "checkpoint-2")

    trainer = judged_trainer(tmp_path, [3.0, 1.0, 2.0, 5.0], callbacks=[Harm()], load_best_model_at_end=True)
    trainer.fit(FRESH)
    assert logged[-2:] == [
        f"checkpoint-2, where eval_loss was best, is not complete in {tmp_path}: the last model is saved",
        f"saved the model to {tmp_path}",
    ]


def test_training_stops_when_nothing_improves(tmp_path: Path, logged: list[str]) -> None:
    losses = [3.0, 2.0, 1.99, 2.5, 2.6, 0.1, 0.1]
    options = {"early_stopping_patience": 3, "early_stopping_threshold": 0.1}
    trainer = judged_trainer(tmp_path / "a", losses, **options)
    result = trainer.fit(FRESH)
    assert result.step == 5 and result.stopped_by is None
    line = "stopping early: eval_loss has not improved by more than 0.1 in 3 evaluations; its best is 1.99, at step 3"
    assert line in logged
    assert (tmp_path / "a/model.safetensors").is_file()

    # resumed in between it stops at the same step, and resumed afterwards at once
    trainer = judged_trainer(tmp_path / "b", losses, callbacks=[KillAt(3)], **options)
    with pytest.raises(KilledError):
        trainer.fit(FRESH)
    resumed = judged_trainer(tmp_path / "b", losses, start=steps_of(tmp_path / "b")[-1], **options)
    assert resumed.fit(Start(tmp_path / "b" / f"checkpoint-{steps_of(tmp_path / 'b')[-1]}")).step == 5
    again = judged_trainer(tmp_path / "b", losses, start=5, **options)
    assert again.fit(Start(tmp_path / "b" / "checkpoint-5")).step == 5
    assert "where it stopped early: nothing to train" in logged[-2]


def test_the_checkpoint_resumed_from_stays_until_a_newer_one_is_complete(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    fake_trainer(tmp_path, total_steps=4, **options).fit(FRESH)
    assert steps_of(tmp_path) == [4]
    present: list[list[int]] = []

    class Watch(Callback):
        def on_step(self, _record: dict) -> None:
            present.append(steps_of(tmp_path))

    trainer = fake_trainer(tmp_path, total_steps=8, callbacks=[Watch()], **options)
    with open_output_folder(tmp_path, resume_from_checkpoint=True, overwrite_output_dir=False) as start:
        trainer.model.load(start.checkpoint)
        trainer.fit(start)
    assert present == [[4], [4], [6], [6]]


def test_resuming_a_finished_run_trains_nothing_and_says_so(tmp_path: Path, logged: list[str]) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "total_steps": 4}
    first = fake_trainer(tmp_path, **options)
    first.fit(FRESH)
    logged.clear()
    again = fake_trainer(tmp_path, **options)
    again.model.load(tmp_path / "checkpoint-4")
    result = again.fit(Start(tmp_path / "checkpoint-4"))
    assert result.step == 4
    assert any("nothing to train" in line for line in logged)
    assert problems(tmp_path, hashes=True) == []


def test_resuming_says_what_changed_and_refuses_other_data(tmp_path: Path, logged: list[str]) -> None:
    options = {"save_strategy": "steps", "save_steps": 2}
    fake_trainer(tmp_path, total_steps=2, **options).fit(FRESH)
    start = Start(tmp_path / "checkpoint-2")
    logged.clear()
    trainer = fake_trainer(
        tmp_path,
        total_steps=3,
        resolved_config={"learning_rate": 0.01, "unified_checkpoint_config": ("async_save",)},
        identity=identity(cpu_settings={"MKL_DEBUG_CPU_TYPE": "", "cpu_kernels": "paddle"}),
        **options,
    )
    trainer.model.load(start.checkpoint)
    trainer.fit(start)
    assert "changed since the checkpoint: learning_rate 0.05 -> 0.01" in logged
    assert "changed since the checkpoint: unified_checkpoint_config null -> [async_save]" in logged
    assert "warning: resuming is not bit-exact: MKL_DEBUG_CPU_TYPE was 7, is " in logged
    with pytest.raises(CheckpointError, match="fingerprint was abc, is other"):
        fake_trainer(tmp_path, identity=identity(data_fingerprint="other")).fit(start)


def test_optimizer_state_can_be_left_out_and_ignored(tmp_path: Path, logged: list[str]) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "ignore_save_lr_and_optim": True}
    fake_trainer(tmp_path, total_steps=2, **options).fit(FRESH)
    start = Start(tmp_path / "checkpoint-2")
    assert not list(start.checkpoint.glob("optimizer*"))
    with pytest.raises(CheckpointError, match="has no optimizer state"):
        fake_trainer(tmp_path, total_steps=4, **options).fit(start)
    logged.clear()
    trainer = fake_trainer(tmp_path, total_steps=4, ignore_load_lr_and_optim=True, **options)
    trainer.model.load(start.checkpoint)
    assert trainer.fit(start).step == 4
    assert any("fresh moments" in line for line in logged)


def test_ignoring_the_optimizer_state_of_a_checkpoint_changes_the_run(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 3}
    fake_trainer(tmp_path, total_steps=6, **options).fit(FRESH)
    ends = []
    for ignored in (False, True):
        trainer = fake_trainer(tmp_path / str(ignored), total_steps=6, ignore_load_lr_and_optim=ignored, **options)
        trainer.model.load(tmp_path / "checkpoint-3")
        trainer.fit(Start(tmp_path / "checkpoint-3"))
        ends.append(trainer.model.arrays()["lm_head.weight"])
    assert not np.array_equal(*ends)


@pytest.mark.parametrize("saved", [True, False])
def test_not_finite_names_step_samples_and_the_last_good_checkpoint(tmp_path: Path, saved: bool) -> None:
    plan = FakePlan()
    culprit = plan.micro_batches(4)[1].samples[0][0]  # in the fifth step; the epoch before had it in another
    before = [step for step in range(4) if any((culprit,) in batch.samples for batch in plan.micro_batches(step))]
    first_bad = min([*before, 4])
    micro_batch = next(
        index for index, batch in enumerate(plan.micro_batches(first_bad)) if (culprit,) in batch.samples
    )
    trainer = fake_trainer(
        tmp_path,
        objective=poisoned("loss", culprit),
        save_strategy="steps" if saved else "no",
        save_steps=1,
        describe_sample=lambda index: f"train.jsonl:{index + 1}",
    )
    with pytest.raises(TrainingError) as caught:
        trainer.fit(FRESH)
    text = str(caught.value)
    assert text.startswith(f"step {first_bad + 1}: the loss is not finite")
    assert f"micro-batch {micro_batch}: " in text
    assert f"train.jsonl:{culprit + 1}" in text
    assert len([line for line in text.splitlines() if "micro-batch" in line]) == 1
    if saved and first_bad:
        assert f"last good checkpoint is {tmp_path / f'checkpoint-{first_bad}'}" in text
    else:
        assert "No checkpoint was saved" in text
    assert all(np.isfinite(value).all() for value in trainer.model.arrays().values())


def test_a_step_without_targets_is_skipped_and_said(tmp_path: Path, logged: list[str]) -> None:
    class PartlyEmpty(FakePlan):
        def micro_batches(self, step: int) -> list[FakeBatch]:
            batches = super().micro_batches(step)
            if step != 1:
                return batches
            return [FakeBatch(b.input_ids, np.full_like(b.labels, PADDING), b.samples) for b in batches]

    logged.clear()
    recorder = Recorder()
    trainer = fake_trainer(tmp_path, total_steps=3, plan=PartlyEmpty(), callbacks=[recorder])
    assert trainer.fit(FRESH).step == 3
    assert "step 2: skipped, its batches hold no target tokens" in logged


def test_steps_can_be_read_ahead(tmp_path: Path) -> None:
    closed = []

    def read_steps(first: int, stop: int) -> Generator[list[FakeBatch], None, None]:
        try:
            for step in range(first, stop):
                yield plan.micro_batches(step)
        finally:
            closed.append((first, stop))

    plan = FakePlan()
    ahead, plain = fake_trainer(tmp_path / "a", read_steps=read_steps), fake_trainer(tmp_path / "b")
    ahead.fit(FRESH)
    plain.fit(FRESH)
    assert closed == [(0, 9)]
    for name, value in plain.model.arrays().items():
        np.testing.assert_array_equal(ahead.model.arrays()[name], value, err_msg=name)


class SignalAt(Callback):
    """Sends a signal to this process during a step."""

    def __init__(self, number: int, step: int, times: int = 1) -> None:
        self.number, self.step, self.times = number, step, times

    def on_step(self, record: dict) -> None:
        if record["step"] == self.step:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


def test_the_two_signals_of_a_closed_terminal_are_one(tmp_path: Path) -> None:
    trainer = fake_trainer(tmp_path, callbacks=[SignalAt(signal.SIGHUP, 4, times=2)], save_strategy="epoch")
    assert trainer.fit(FRESH).exit_code == 129
    assert steps_of(tmp_path) == [3, 4]


def test_nohup_is_respected(tmp_path: Path) -> None:
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert fake_trainer(tmp_path, callbacks=[SignalAt(signal.SIGHUP, 4)]).fit(FRESH).stopped_by is None
    finally:
        signal.signal(signal.SIGHUP, earlier)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_stops_after_the_step_with_a_checkpoint(
    tmp_path: Path, number: int, code: int, logged: list[str]
) -> None:
    handlers = [signal.getsignal(n) for n in STOP_SIGNALS]
    logged.clear()
    recorder = Recorder()
    trainer = fake_trainer(tmp_path, callbacks=[recorder, SignalAt(number, 4)], save_strategy="epoch")
    result = trainer.fit(FRESH)
    assert (result.stopped_by, result.exit_code, result.step) == (number, code, 4)
    assert steps_of(tmp_path) == [3, 4]
    assert any("resume_from_checkpoint=true" in line for line in logged)
    assert not (tmp_path / "model.safetensors").exists()  # the final model is that of a finished run
    assert [signal.getsignal(n) for n in STOP_SIGNALS] == handlers

    whole = fake_trainer(tmp_path / "whole")
    whole.fit(FRESH)
    resumed = fake_trainer(tmp_path, save_strategy="epoch")
    resumed.model.load(tmp_path / "checkpoint-4")
    resumed.fit(Start(tmp_path / "checkpoint-4"))
    for name, value in whole.model.arrays().items():
        np.testing.assert_array_equal(resumed.model.arrays()[name], value, err_msg=name)


def test_the_signal_handler_itself_prints_nothing(tmp_path: Path, logged: list[str]) -> None:
    """It may interrupt a print of the loop, and Python refuses to print within a print."""

    class Printing(Callback):
        def on_step(self, record: dict) -> None:
            if record["step"] == 2:
                before = len(logged)
                os.kill(os.getpid(), signal.SIGINT)
                assert len(logged) == before

    fake_trainer(tmp_path, callbacks=[Printing()]).fit(FRESH)
    assert "SIGINT: stopping after this step; send it again to stop immediately" in logged


def test_a_run_that_was_stopped_where_it_resumed_is_not_saved_again(tmp_path: Path) -> None:
    """`output_dir` and the checkpoint may be spelled differently."""
    fake_trainer(tmp_path / "run", total_steps=2, save_strategy="epoch").fit(FRESH)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    start = Start(tmp_path / "link" / "checkpoint-2")
    recorder = Recorder()

    class StopAtOnce(Callback):
        def on_train_begin(self, run: TrainingRun) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = fake_trainer(tmp_path / "run", total_steps=4, save_strategy="epoch", callbacks=[recorder, StopAtOnce()])
    trainer.model.load(start.checkpoint)
    assert trainer.fit(start).step == 2
    assert recorder.saved == []


def test_a_signal_without_a_save_strategy_says_that_nothing_was_saved(tmp_path: Path, logged: list[str]) -> None:
    trainer = fake_trainer(tmp_path, callbacks=[SignalAt(signal.SIGTERM, 2)])
    assert trainer.fit(FRESH).exit_code == 143
    assert steps_of(tmp_path) == []
    assert any("nothing was saved" in line for line in logged)


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    closed = []

    class Closing(Callback):
        def close(self) -> None:
            closed.append(True)

    trainer = fake_trainer(
        tmp_path, callbacks=[SignalAt(signal.SIGINT, 2, times=2), Closing()], save_strategy="steps", save_steps=100
    )
    with pytest.raises(SystemExit) as caught:
        trainer.fit(FRESH)
    assert caught.value.code == 130
    assert steps_of(tmp_path) == []
    assert closed == [True]


class SignalsInBackward(PyLayer):
    """The value unchanged; two signals arrive while its gradient is made."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        return gradient


def test_a_second_signal_in_a_backward_pass_is_no_failure(tmp_path: Path, logged: list[str]) -> None:
    """Paddle makes an OSError of what is raised there."""
    trainer = fake_trainer(tmp_path)
    loss = trainer.objective.loss

    def with_signals(model: Any, batch: Any) -> Any:
        result = loss(model, batch)
        return result._replace(loss_sum=SignalsInBackward.apply(result.loss_sum))

    trainer.objective = replace(trainer.objective, loss=FakeLoss(with_signals))
    with pytest.raises(SystemExit) as caught:
        trainer.fit(FRESH)
    assert caught.value.code == 130
    assert logged[-1] == "a second signal: stopped at once; no checkpoint was saved"


def test_a_failing_disk_ends_the_run_with_the_earlier_checkpoint_intact(tmp_path: Path) -> None:
    trainer = fake_trainer(tmp_path, save_strategy="steps", save_steps=2)
    save = trainer.model.save

    def write_model(folder: Path) -> None:
        if "4" in folder.name:
            (folder / "model.safetensors").symlink_to("/dev/full")
        save(folder)

    trainer.folder.write_model = write_model
    with pytest.raises(CheckpointError, match="No space left"):
        trainer.fit(FRESH)
    assert steps_of(tmp_path) == [2]
    assert problems(tmp_path / "checkpoint-2", hashes=True) == []


def test_a_signal_during_the_last_step_finishes_the_run(tmp_path: Path) -> None:
    result = fake_trainer(tmp_path, total_steps=3, callbacks=[SignalAt(signal.SIGINT, 3)]).fit(FRESH)
    assert (result.step, result.exit_code) == (3, 0)
    assert problems(tmp_path, hashes=True) == []


def test_a_signal_between_saving_and_the_next_step_still_leaves_this_step(tmp_path: Path) -> None:
    class SignalOnEvaluate(Callback):
        def on_evaluate(self, record: dict) -> None:
            if record["step"] == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = fake_trainer(
        tmp_path,
        callbacks=[SignalOnEvaluate()],
        evaluation_plan=EVALUATION,
        evaluation_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=2,
    )
    assert trainer.fit(FRESH).exit_code == 143
    assert steps_of(tmp_path) == [2, 3]


def test_a_step_has_the_limits_that_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}

    def recording(*parts: Any, **named: Any) -> Any:
        told.update(named)
        return train_step(*parts, **named)

    monkeypatch.setattr("erniekit.training.trainer.train_step", recording)
    fake_trainer(tmp_path, total_steps=1, max_grad_norm=0.25, release_grads=True).fit(FRESH)
    assert (told["max_grad_norm"], told["release_grads"]) == (0.25, True)

"""What a run shows and records."""

from __future__ import annotations

import builtins
import errno
import importlib.util
import io
import json
import math
import os
import pty
import resource
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from erniekit.config.registry import PARAMETERS
from erniekit.config.sections.basic import BasicParameters
from erniekit.errors import ConfigurationError
from erniekit.training.callbacks import Callback, CallbackList, TrainingRun, defaults
from erniekit.training.callbacks.closing_lines import VIEWERS, ClosingLines
from erniekit.training.callbacks.console import PlainLines, duration, evaluation_lines, format_details, format_metrics
from erniekit.training.callbacks.defaults import default_callbacks
from erniekit.training.callbacks.files import LogFile, Results, WarnOnIoError, read_log
from erniekit.training.callbacks.live_progress import Echo, LiveProgress
from erniekit.training.callbacks.loss_curve import LossCurve, draw_loss_curve, smoothed
from erniekit.training.callbacks.trackers import TRACKERS, EventLog, installed_trackers, open_trackers
from erniekit.training.checkpoint.manifest import write_json
from erniekit.training.checkpoint.resume import Start
from erniekit.training.early_stopping import BestSoFar
from erniekit.training.result import TrainResult

from .fakes import FakePlan, fake_trainer
from .test_resume import KillAt, KilledError

RECORD = {
    "step": 4,
    "epoch": 0.5,
    "loss": 2.5,
    "learning_rate": 3e-4,
    "grad_norm": 0.75,
    "token_accuracy": 0.25,
    "tokens_per_second": 2345.6,
}
EVALUATED = {
    "step": 4,
    "epoch": 0.5,
    "eval_loss": 1.5,
    "eval_perplexity": 4.4817,
    "eval_token_accuracy": 0.5,
    "eval_batches": 3,
    "eval_batches_available": 9,
    "eval_units": 77,
    "eval_seconds": 0.25,
}


def section(output_dir: Path, *, disable_tqdm: bool = True) -> BasicParameters:
    logging_dir = str(output_dir / "logs")
    return BasicParameters(output_dir=str(output_dir), logging_dir=logging_dir, report_to=(), disable_tqdm=disable_tqdm)


def begin(first_step: int, total_steps: int) -> TrainingRun:
    return TrainingRun("run", Path("output/run"), {"learning_rate": 0.05}, first_step, total_steps)


def test_callbacks_need_no_method_and_are_called_in_order() -> None:
    calls = []

    class Only(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_log(self, record: dict) -> None:
            calls.append((self.name, record["step"]))

    callbacks = CallbackList([Only("a"), Callback(), Only("b")])
    callbacks.on_log(RECORD)
    callbacks.on_save(Path("x"))
    assert calls == [("a", 4), ("b", 4)]


def test_every_hook_reaches_the_callbacks() -> None:
    hooks = [name for name in vars(Callback) if not name.startswith("_")]
    calls: list[str] = []
    watching = Callback()
    for hook in hooks:
        setattr(watching, hook, lambda *_, hook=hook: calls.append(hook))
    for hook in hooks:
        getattr(CallbackList([watching]), hook)(*([] if hook == "close" else [RECORD]))
    assert calls == hooks and len(hooks) == 7


def test_a_misspelt_hook_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Tracker.on_trian_begin is no hook .*; did you mean on_train_begin\?"):

        class Tracker(Callback):
            def on_trian_begin(self, run: TrainingRun) -> None: ...

    with pytest.raises(TypeError, match=r"on_batch_x is no hook of a callback; "):
        type("Tracker", (Callback,), {"on_batch_x": lambda self: None})


def test_what_is_no_callback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="is no callback; derive object from Callback"):
        fake_trainer(tmp_path, callbacks=[object()])


def test_a_callback_learns_the_name_and_the_parameters_of_the_run(tmp_path: Path) -> None:
    class Tracker(Callback):
        def on_train_begin(self, run: TrainingRun) -> None:
            self.run = run

    tracker = Tracker()
    fake_trainer(tmp_path / "first-try", total_steps=1, callbacks=[tracker]).fit(Start(None))
    assert tracker.run == ("first-try", tmp_path / "first-try", {"learning_rate": 0.05}, 0, 1)


def test_every_tracker_that_can_be_chosen_can_be_opened() -> None:
    assert tuple(TRACKERS) == PARAMETERS["report_to"].choices


def test_plain_lines(logged: list[str]) -> None:
    lines = PlainLines()
    lines.on_train_begin(begin(0, 10))
    lines.on_log(RECORD)
    lines.on_evaluate(EVALUATED)
    lines.on_save(Path("out/checkpoint-4"))
    assert logged[0].startswith(
        "step 4/10  loss 2.5000  accuracy 25.0%  lr 0.0003  grad norm 0.75  tokens/s 2,346  ETA 0:"
    )
    assert logged[1] == ("evaluation at step 4  loss 1.5000  perplexity 4.482  accuracy 50.0%  (3 of 9 batches, 0.2 s)")
    assert logged[2] == "saved out/checkpoint-4"


def test_figures_of_another_objective_are_shown_by_name() -> None:
    record = {"step": 1, "loss": 0.5, "another_figure": 0.1234567}
    assert (format_metrics(record), format_details(record)) == ("loss 0.5000", "another figure 0.1235")


def test_figures_of_codes_are_shown_level_by_level() -> None:
    record = {"step": 1, "loss": 2.5, "code_accuracy": 0.25, "loss_0": 2.25, "accuracy_0": 0.5, "text_accuracy": 0.125}
    assert format_metrics(record) == "loss 2.5000  code accuracy 25.0%  text accuracy 12.5%"
    assert format_details(record) == "loss 0 2.25  accuracy 0 50.0%"


PREFERENCES = {
    "loss": 0.31, "reward_accuracy": 0.971, "reward_margin": 0.3412, "reward_chosen": 0.21, "reward_rejected": -0.13,
    "logps_chosen": -12.34567, "logps_rejected": -15.5, "kl_to_reference": -0.2334, "preference_loss": 0.31,
}  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "eval_"])
def test_figures_of_pairs_have_short_labels_in_two_lines(prefix: str) -> None:
    record = {f"{prefix}{name}": value for name, value in PREFERENCES.items()}
    assert format_metrics(record) == "loss 0.3100  reward accuracy 97.1%  margin 0.341"
    assert format_details(record) == (
        "reward chosen 0.21  rejected -0.13  logp chosen -12.35  rejected -15.5  KL -0.233  preference loss 0.3100"
    )


def test_an_evaluation_of_pairs_fills_two_lines_without_raw_names() -> None:
    record = {"step": 5, "eval_batches": 1, "eval_batches_available": 2, "eval_seconds": 0.5, "eval_units": 7}
    record |= {f"eval_{name}": value for name, value in PREFERENCES.items()}
    first, second = evaluation_lines(record).splitlines()
    assert first.endswith("(1 of 2 batches, 0.5 s)") and second.startswith("  reward chosen")
    assert "_" not in first + second


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (61, "1:01"), (3725, "1:02:05")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_live_progress_shows_step_figures_and_time_left() -> None:
    screen = io.StringIO()
    live = LiveProgress(Console(file=screen, force_terminal=True, width=120))
    live.on_train_begin(begin(2, 10))
    live.on_step(RECORD)
    live.on_evaluate(EVALUATED)
    live.close()
    text = screen.getvalue()
    for words in ("4/10", "ETA", "loss 2.5000", "lr 0.0003", "grad norm 0.75", "accuracy 25.0%", "tokens/s 2,346"):
        assert words in text
    assert "evaluation at step 4  loss 1.5000" in text
    assert "step 4/10  loss" not in text  # the history, which `on_log` writes


def test_a_terminal_keeps_the_history_of_the_mean_loss() -> None:
    screen = io.StringIO()
    live = LiveProgress(Console(file=screen, force_terminal=True, width=200))
    live.on_train_begin(begin(0, 10))
    live.on_log(RECORD)
    live.on_log(RECORD | {"step": 8, "loss": 1.25})
    live.close()
    lines = screen.getvalue().splitlines()
    assert any("step 4/10  loss 2.5000" in line for line in lines)
    assert any("step 8/10  loss 1.2500" in line for line in lines)
    bar = next(line for line in lines if "0/10" in line)
    assert bar.count("\N{BOX DRAWINGS HEAVY HORIZONTAL}") > 120  # it uses the width


def test_typed_characters_are_not_echoed_into_the_display(monkeypatch: pytest.MonkeyPatch) -> None:
    shell, terminal = pty.openpty()
    with os.fdopen(terminal, "rb") as stream, os.fdopen(shell, "rb"):
        echo = Echo(stream)
        monkeypatch.setattr(os, "tcgetpgrp", lambda descriptor: os.getpgrp() + 1)
        echo.switch_off()  # in the background
        assert termios.tcgetattr(terminal)[3] & termios.ECHO
        monkeypatch.setattr(os, "tcgetpgrp", lambda descriptor: os.getpgrp())
        echo.switch_off()
        assert not termios.tcgetattr(terminal)[3] & termios.ECHO
        echo.restore()
        assert termios.tcgetattr(terminal)[3] & termios.ECHO
    Echo(io.StringIO()).switch_off()


def write_log(folder: Path, losses: list[float], evaluated: list[float] = ()) -> Path:
    records = [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
    records += [{"step": step, "eval_loss": loss} for step, loss in enumerate(evaluated, start=1)]
    log = folder / "training_log.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    return log


def drawn(log: Path, monkeypatch: pytest.MonkeyPatch, title: str = ""):
    """The axes of the curve."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **options: figures.append(figure))
    draw_loss_curve(log, log.with_name("loss.png"), title)
    return figures[0].axes[0]


def test_a_curve_has_a_title_and_an_axis_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn(write_log(tmp_path, [2.0, 1.5], [1.8]), monkeypatch, "a run")
    assert axes.get_title() == "a run" and axes.get_yscale() == "linear" and len(axes.lines) == 2
    assert drawn(write_log(tmp_path, [5.0, 0.4]), monkeypatch).get_yscale() == "log"
    assert drawn(write_log(tmp_path, [5.0, -0.1]), monkeypatch).get_yscale() == "linear"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("title", ["costs $1 or ${x_", "模型"])
def test_any_folder_can_be_a_title(title: str, tmp_path: Path) -> None:
    draw_loss_curve(write_log(tmp_path, [2.0, 1.5]), tmp_path / "loss.png", title)
    assert (tmp_path / "loss.png").is_file()


def test_a_noisy_curve_is_smoothed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = [2.0 + (-1) ** step * 0.5 for step in range(300)]
    pale, mean = drawn(write_log(tmp_path, losses), monkeypatch).lines
    assert list(pale.get_ydata()) == losses and pale.get_alpha() == 0.3
    assert max(abs(value - 2.0) for value in mean.get_ydata()) < 0.2
    assert smoothed([(1, 4.0), (2, 1.0), (5, 1.0)]) == [(1, 2.5), (2, 2.0), (5, 1.0)]


def test_the_curve_exists_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    write_log(tmp_path, [2.0, 1.5])
    curve, picture = LossCurve(tmp_path), tmp_path / "loss.png"
    curve.on_train_begin(begin(0, 10))
    curve.on_log(RECORD)
    assert not picture.exists()
    for hook, argument in ((curve.on_log, RECORD), (curve.on_evaluate, EVALUATED), (curve.on_save, tmp_path)):
        now[0] += 61
        hook(argument)
        assert picture.read_bytes().startswith(b"\x89PNG")
        picture.unlink()
        hook(argument)  # not again at once
        assert not picture.exists()
    assert not list(tmp_path.glob(".loss*"))


def test_the_last_lines_say_what_is_where_and_what_comes_next(tmp_path: Path, logged: list[str]) -> None:
    write_log(tmp_path, [2.0, 1.5, 0.25])
    (tmp_path / "loss.png").touch()
    best = BestSoFar(step=2, value=0.5, metric="eval_exact_match", greater=True)
    result = TrainResult(3, 1.0, 1.2, {}, 10, 1.0, None, None, best)
    lines = ClosingLines(tmp_path / "my logs", ["visualdl"])
    lines.on_train_begin(begin(0, 3)._replace(output_dir=tmp_path))
    lines.on_evaluate(EVALUATED)
    lines.on_train_end(result)
    text = "\n".join(logged)
    assert "done: 3 steps, 0:00, loss 2.0000 -> 0.2500" in text
    assert "best evaluation: exact match 0.5 at step 2" in text
    for words in (f"curve: {tmp_path / 'loss.png'}", f"visualdl --logdir '{tmp_path}/my logs'"):
        assert words in text
    assert logged[-3:] == [
        f"  erniekit chat {tmp_path}",
        f"  erniekit eval {tmp_path}",
        f"  erniekit export {tmp_path} --output DIR",
    ]
    logged.clear()
    lines = ClosingLines(None, [])
    lines.on_train_begin(begin(0, 3)._replace(output_dir=tmp_path, config={"stage": "PT"}))
    lines.on_train_end(result)
    assert f"  erniekit generate --raw --prompt TEXT {tmp_path}" in logged
    lines.on_train_begin(begin(0, 3)._replace(output_dir=tmp_path, config={"train_dataset_type": ["asr"]}))
    lines.on_train_end(result)
    assert f"  erniekit transcribe {tmp_path} RECORDINGS" in logged
    lines.on_train_begin(begin(0, 3)._replace(output_dir=tmp_path, config={"stage": "TTS"}))
    lines.on_train_end(result)
    assert f"  erniekit speak {tmp_path} --text TEXT --output FILE.wav" in logged
    assert not any("visualdl" in line or " eval " in line for line in logged)


def test_the_last_lines_of_a_run_with_rewards_tell_the_reward(tmp_path: Path, logged: list[str]) -> None:
    log = LogFile(tmp_path)
    for step, reward in ((1, 0.25), (2, 0.75)):
        log.on_log({"step": step, "loss": 0.0, "reward": reward})
    lines = ClosingLines(None, [])
    lines.on_train_begin(begin(0, 2)._replace(output_dir=tmp_path, config={"stage": "GRPO"}))
    lines.on_train_end(TrainResult(2, 1.0, 0.0, {}, 10, 1.0, None, None, BestSoFar()))
    assert any("done: 2 steps" in line and line.endswith(", reward 0.2500 -> 0.7500") for line in logged)


def test_every_tracker_has_its_viewer() -> None:
    assert VIEWERS.keys() == TRACKERS.keys()


@pytest.mark.parametrize(
    ("terminal", "disabled", "plain"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_lines_are_plain_where_there_is_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool, disabled: bool, plain: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    callbacks = default_callbacks(section(tmp_path, disable_tqdm=disabled))
    assert isinstance(callbacks[0], PlainLines if plain else LiveProgress)
    assert not (tmp_path / "logs").exists()


def test_visualdl_event_files(tmp_path: Path) -> None:
    from visualdl import LogReader

    (log,) = open_trackers(["visualdl"], tmp_path)
    log.on_log(RECORD | {"grad_norm": math.inf})
    log.on_evaluate(EVALUATED)
    log.close()
    (file,) = tmp_path.iterdir()
    tags = LogReader(file_path=str(file)).get_tags()["scalar"]
    assert {"train/loss", "train/learning_rate", "eval/loss", "eval/perplexity"} <= set(tags)
    assert "train/grad_norm" not in tags
    (point,) = LogReader(file_path=str(file)).get_data("scalar", "train/loss")
    assert (point.id, point.value) == (4, 2.5)


def test_tensorboard_event_files(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event

    (log,) = open_trackers(["tensorboard"], tmp_path)
    log.on_log(RECORD)
    log.close()
    (file,) = tmp_path.iterdir()
    events = [Event.FromString(data) for data in records_of(file.read_bytes())]
    scalars = {value.tag: (event.step, value.simple_value) for event in events for value in event.summary.value}
    assert scalars["train/loss"] == (4, 2.5)


def records_of(data: bytes) -> list[bytes]:
    """The records of a TFRecord file: length (8 bytes), its checksum (4), content, checksum (4)."""
    records = []
    while data:
        length = int.from_bytes(data[:8], "little")
        records.append(data[12 : 12 + length])
        data = data[16 + length :]
    return records


@pytest.mark.parametrize(("name", "package"), [("visualdl", "visualdl"), ("tensorboard", "tensorboardX")])
def test_a_missing_logger_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    imported = builtins.__import__

    def without(module: str, *arguments: object, **options: object) -> object:
        if module == package:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
        return imported(module, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigurationError, match=f"report_to: {name} needs the package {package}.*not installed"):
        open_trackers([name], tmp_path)


def test_a_default_logger_that_is_missing_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "erniekit")
    assert installed_trackers(["visualdl"]) == ["visualdl"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert installed_trackers(["visualdl"]) == []
    assert "no event files for visualdl: it is not installed (pip install 'erniekit[logs]')" in caplog.text


@pytest.mark.parametrize("name", ["visualdl", "tensorboard"])
def test_an_unwritable_folder_of_event_files_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file/logs", Path("/proc/logs")):
        with pytest.raises(ConfigurationError, match=f"logging_dir {folder} cannot be written"):
            open_trackers([name], folder)


def run(output_dir: Path, first: Start, *extra: Callback, total_steps: int = 6, disable_tqdm: bool = True) -> None:
    callbacks = default_callbacks(section(output_dir, disable_tqdm=disable_tqdm))
    trainer = fake_trainer(
        output_dir,
        total_steps=total_steps,
        callbacks=[*callbacks, *extra],
        evaluation_plan=FakePlan(4, batch_size=1, accumulation=1),
        logging_steps=1,
        evaluation_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
    )
    if first.checkpoint:
        trainer.model.load(first.checkpoint)
    trainer.fit(first)


def test_files_of_a_run(tmp_path: Path) -> None:
    run(tmp_path, Start(None))
    log = list(read_log(tmp_path / "training_log.jsonl"))
    assert [record["step"] for record in log if "loss" in record] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in log if "eval_loss" in record] == [2, 4, 6]
    trained = json.loads((tmp_path / "train_results.json").read_text())
    assert trained.keys() >= {"train_loss", "train_tokens_per_second", "train_token_accuracy", "step", "epoch"}
    assert json.loads((tmp_path / "eval_results.json").read_text())["step"] == 6
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_log_of_a_resumed_run_is_that_of_an_uninterrupted_one(tmp_path: Path) -> None:
    run(tmp_path / "whole", Start(None))
    with pytest.raises(KilledError):
        run(tmp_path / "killed", Start(None), KillAt(5))
    lines = (tmp_path / "killed" / "training_log.jsonl").read_text()
    (tmp_path / "killed" / "training_log.jsonl").write_text(lines + '{"step": 5, "lo')  # cut off in the middle
    run(tmp_path / "killed", Start(tmp_path / "killed" / "checkpoint-4"))

    def comparable(folder: Path) -> list[dict]:
        timed = ("tokens_per_second", "eval_seconds")
        return [
            {name: value for name, value in record.items() if name not in timed}
            for record in read_log(folder / "training_log.jsonl")
        ]

    assert comparable(tmp_path / "killed") == comparable(tmp_path / "whole")


def test_a_new_run_starts_a_new_log(tmp_path: Path) -> None:
    log = LogFile(tmp_path)
    log.on_log(RECORD)
    log.on_train_begin(begin(0, 10))
    assert list(read_log(tmp_path / "training_log.jsonl")) == []


def test_results_hold_only_what_json_knows(tmp_path: Path) -> None:
    Results(tmp_path).on_evaluate(EVALUATED | {"eval_perplexity": math.inf})
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_perplexity"] is None
    write_json(tmp_path / "nested.json", {"value": math.nan})
    assert (tmp_path / "nested.json").read_text() == '{\n  "value": null\n}\n'


def test_what_is_only_sometimes_needed_is_imported_late() -> None:
    code = (
        "import sys, erniekit.training.callbacks.defaults as d, tempfile;"
        "from erniekit.config.sections.basic import BasicParameters;"
        "p = tempfile.mkdtemp();"
        "d.default_callbacks(BasicParameters(output_dir=p, logging_dir=p, report_to=(), disable_tqdm=True));"
        "print([m for m in ('paddle', 'matplotlib', 'visualdl', 'tensorboardX', 'rich') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_full_disk_ends_no_run_and_loses_no_line_of_the_log(tmp_path: Path, logged: list[str]) -> None:
    log = LogFile(tmp_path)
    log.on_train_begin(begin(0, 9))
    log.on_log({"step": 1, "loss": 3.0})
    path = tmp_path / "training_log.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))  # room for a part of a line
    try:
        log.on_log({"step": 2, "loss": 2.0})
        log.on_log({"step": 3, "loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == '{"step": 1, "loss": 3.0}\n'
    assert logged == [f"warning: could not write {path}: File too large; the run goes on"]
    log.on_log({"step": 4, "loss": 0.5})
    assert [record["step"] for record in read_log(path)] == [1, 2, 3, 4]


def test_results_that_cannot_be_written_are_told(tmp_path: Path, logged: list[str]) -> None:
    results = Results(tmp_path / "gone")
    results.on_evaluate(EVALUATED)
    results.on_evaluate(EVALUATED)
    (message,) = logged
    assert message.startswith(f"warning: could not write results into {tmp_path / 'gone'}: No such file")


def test_event_files_that_cannot_be_written_are_told(logged: list[str]) -> None:
    class FullDisk:
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        close = staticmethod(lambda: None)

    logged.clear()
    EventLog(FullDisk(), WarnOnIoError("events")).on_log(RECORD)
    assert logged == ["warning: could not write events: No space left on device; the run goes on"]


@pytest.mark.proves("report_to", "logging_dir")
def test_trackers_are_those_that_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(
        defaults, "open_trackers", lambda names, folder: told.append((*names, folder)) or [LogFile(folder)]
    )
    monkeypatch.setattr(defaults, "installed_trackers", lambda names: [f"installed {name}" for name in names])
    asked = BasicParameters(output_dir=str(tmp_path), logging_dir=str(tmp_path / "l"), report_to=("tensorboard",))
    for skip in (False, True):
        closing = default_callbacks(asked, skip_missing_trackers=skip)[-1]
        assert closing._logging_dir == tmp_path / "l"
    assert told == [("tensorboard", tmp_path / "l"), ("installed tensorboard", tmp_path / "l")]

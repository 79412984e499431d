"""What a run shows and records."""

from __future__ import annotations

import builtins
import errno
import importlib.util
import io
import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from erniekit.config.registry import PARAMETERS
from erniekit.config.sections.basic import BasicParameters
from erniekit.errors import ConfigurationError
from erniekit.training.callbacks import Callback, CallbackList, TrainingRun
from erniekit.training.callbacks.console import PlainLines, duration, format_metrics
from erniekit.training.callbacks.defaults import default_callbacks
from erniekit.training.callbacks.files import LogFile, Results, WarnOnIoError, read_log
from erniekit.training.callbacks.live_progress import LiveProgress
from erniekit.training.callbacks.trackers import TRACKERS, EventLog, installed_trackers, open_trackers
from erniekit.training.checkpoint.manifest import write_json
from erniekit.training.checkpoint.resume import Start

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
    assert format_metrics({"step": 1, "loss": 0.5, "another": 0.1234567}) == "loss 0.5000  another 0.1235"


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
    pytest.importorskip("tensorboardX")
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

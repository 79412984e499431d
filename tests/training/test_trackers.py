"""Trackers whose clients run in a process of their own: what they are told, and what happens when they fail.

The libraries here are fakes; the real ones read back what they were told in tests/parity/test_trackers.py.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from erniekit.config.sections.basic import TRACKERS as CHOICES
from erniekit.training.callbacks import TrainingRun
from erniekit.training.callbacks.reported import card_of, evaluation_figures, facts_of, samples_of, training_figures
from erniekit.training.callbacks.tracker_clients import CLIENTS
from erniekit.training.callbacks.tracker_process import TrackerProcess
from erniekit.training.callbacks.trackers import TRACKERS, installed_trackers, open_trackers
from erniekit.training.result import TrainResult

RECORD = {"step": 4, "epoch": 0.5, "loss": 2.5, "grad_norm": math.inf, "tokens": 100}
EVALUATED = {"step": 4, "epoch": 0.5, "eval_loss": 1.5, "eval_answers": 2.0, "eval_sources": {"a": {"eval_loss": 1.0}}}
RESULT = TrainResult(4, 1.0, 2.0, {}, 100, 1.0, None, None)
SECRET = "0123456789abcdef-secret"
# Writes every call as a line of JSON into $TOLD; what it does besides, the test says.
FAKE = """
import json, os, signal, sys
def told(*call):
    with open(os.environ["TOLD"], "a") as file:
        file.write(json.dumps(call) + "\\n")
class Settings(dict): pass
class Table:
    def __init__(self, columns): self.rows = [columns]
    def add_data(self, *row): self.rows.append(row)
def Image(path): return "image " + os.path.basename(path)
def Audio(path): return "sound " + os.path.basename(path)
class Run:
    url, summary = "https://me:pass@tracker.example/run", {}
    def define_metric(self, *a, **k): pass
    def log(self, values):
        told("log", {name: value.rows if isinstance(value, Table) else value for name, value in values.items()})
    def finish(self, exit_code): told("finish", exit_code, self.summary)
def init(**given):
    told("init", given["name"], given["id"], given["config"])
    print("noise", os.environ["WANDB_API_KEY"])
    return Run()
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake wandb is installed, and writes here what it is told."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setenv("TOLD", str(tmp_path / "told.jsonl"))
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    return tmp_path / "told.jsonl"


def break_fake(told: Path, code: str) -> None:
    with open(told.parent / "fake" / "wandb.py", "a") as file:
        file.write(code)


def a_run(folder: Path, first_step: int = 0) -> TrainingRun:
    folder.mkdir(exist_ok=True)
    config = {"model_name_or_path": f"https://me:{SECRET}@host/x", "learning_rate": 0.05, "stage": "SFT"}
    return TrainingRun("run", folder, config, first_step, 8)


def report(folder: Path, *, seconds: float = 20.0, finished: bool = True, first_step: int = 0) -> float:
    """Report a run; the seconds that this took in all but `close`."""
    tracker = TrackerProcess("wandb", folder / "logs", end_seconds=seconds)
    began = time.monotonic()
    tracker.on_train_begin(a_run(folder, first_step))
    tracker.on_log(RECORD)
    tracker.on_evaluate(EVALUATED)
    if finished:
        tracker.on_train_end(RESULT)
    took = time.monotonic() - began
    tracker.close()
    tracker.close()
    return took


def calls(told: Path) -> list:
    return [json.loads(line) for line in told.read_text().splitlines()]


def with_samples(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "loss.png").write_bytes(b"png")
    (folder / "a.wav").write_bytes(b"wav")
    asked = {"place": "a:1", "messages": [{"content": "why?"}], "expected": "so", "answer": f"key {SECRET}", "wer": 0.5}
    spoken = {"place": "a:2", "expected": "hello", "sound": str(folder / "a.wav")}
    (folder / "eval_samples.jsonl").write_text(json.dumps(asked) + "\n" + json.dumps(spoken) + "\n")


def test_every_tracker_has_a_client_or_writes_event_files() -> None:
    assert set(CLIENTS) | {"visualdl", "tensorboard"} == set(TRACKERS) == set(CHOICES)


def test_a_client_is_told_everything_and_no_secret(told: Path, tmp_path: Path, logged: list[str]) -> None:
    with_samples(tmp_path / "run")
    report(tmp_path / "run")
    (init, name, run_id, config), figures, evaluated, samples, picture, finish = calls(told)
    assert (init, name, len(run_id)) == ("init", "run", 16) and config["learning_rate"] == 0.05
    assert config["environment"]["first_step"] == 0 and "numpy" in config["environment"]
    assert figures == ["log", {"train/loss": 2.5, "train/tokens": 100.0, "step": 4}]
    assert evaluated == ["log", {"eval/loss": 1.5, "eval/answers": 2.0, "eval/a/loss": 1.0, "step": 4}]
    columns, asked, spoken = samples[1]["samples"]
    assert columns == ["place", "question", "answer", "expected", "scores"]
    assert asked == ["a:1", "why?", "key ***", "so", "wer 0.5"]
    assert spoken == ["a:2", "", "", "hello", ""] and samples[1]["sounds/1"] == "sound a.wav"
    assert picture == ["log", {"pictures/loss": "image loss.png"}]
    card = finish[2]["model_card"]
    assert finish[1] == 0 and card["results"]["train_tokens"] == 100 and card["parameters"]["stage"] == "SFT"
    assert logged == ["wandb: https://***@tracker.example/run"]
    written = b"".join(path.read_bytes() for path in (tmp_path / "run" / "logs").rglob("*") if path.is_file())
    assert SECRET.encode() not in told.read_bytes() + written and "secret" not in "".join(logged)


def test_a_resumed_run_is_the_same_run_and_a_stopped_one_is_not_finished(told: Path, tmp_path: Path) -> None:
    report(tmp_path / "run", finished=False)
    report(tmp_path / "run", first_step=4)
    report(tmp_path / "run")
    first, second, third = (call[2] for call in calls(told) if call[0] == "init")
    assert first == second != third
    assert [call[1] for call in calls(told) if call[0] == "finish"] == [1, 0, 0]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (f"raise RuntimeError('no {SECRET} here')", "start: RuntimeError: no *** here"),
        ("\ndef init(**given): raise OSError('no server')", "start: OSError: no server"),
        ("\ndef init(**given): sys.exit(1)", "start: SystemExit: 1"),
        ("\ndef log(self, values): raise ValueError('full')\nRun.log = log", "figures: ValueError: full"),
        ("\ndef log(self, values): os._exit(3)\nRun.log = log", "its process has ended with exit code 3"),
        ("\ndef finish(self, exit_code): raise KeyError('x')\nRun.finish = finish", "finish: KeyError: 'x'"),
    ],
    ids=["import", "start", "exit", "middle", "crash", "end"],
)
def test_a_failure_is_told_once_and_ends_no_run(
    told: Path, tmp_path: Path, logged: list[str], broken: str, message: str
) -> None:
    break_fake(told, broken)
    report(tmp_path / "run")
    warnings = [line for line in logged if line.startswith("warning")]
    assert warnings == [f"warning: report_to: wandb: {message}; the run goes on"]


@pytest.mark.parametrize(
    "broken",
    [
        "\ndef init(**given): signal.pause()",
        "\ndef finish(self, exit_code): signal.pause()\nRun.finish = finish",
        "\ndef finish(self, exit_code): os.fork() or signal.pause()\nRun.finish = finish",
    ],
    ids=["start", "end", "child"],
)
def test_a_client_that_hangs_blocks_no_run(told: Path, tmp_path: Path, logged: list[str], broken: str) -> None:
    break_fake(told, broken)
    assert report(tmp_path / "run", seconds=1.0) < 1.0
    warnings = [line for line in logged if line.startswith("warning")]
    if "fork" not in broken:
        (warning,) = warnings
        assert warning.startswith(
            "warning: report_to: wandb: has not ended after 1 s, so it is ended; what it wrote is"
        )


def test_a_client_that_reads_nothing_costs_bounded_memory(
    told: Path, tmp_path: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("erniekit.training.callbacks.tracker_process.MOST_WAITING", 1 << 18)
    break_fake(told, "\ndef init(**given): signal.pause()")
    tracker = TrackerProcess("wandb", tmp_path, end_seconds=0.1)
    tracker.on_train_begin(a_run(tmp_path / "run"))
    for _ in range(100):
        tracker.on_log({"step": 1, "x" * 10000: 1.0})
    assert len(tracker._waiting) <= 1 << 18
    tracker.close()
    assert len([line for line in logged if line.startswith("warning")]) == 1


def test_an_interpreter_that_is_not_there_ends_no_run(tmp_path: Path, logged: list[str]) -> None:
    tracker = TrackerProcess("wandb", tmp_path, python="/nowhere/python")
    tracker.on_train_begin(a_run(tmp_path / "run"))
    tracker.on_log(RECORD)
    tracker.close()
    assert logged == ["warning: report_to: wandb: cannot be started: No such file or directory; the run goes on"]


def test_event_files_have_texts_pictures_and_sound(
    tmp_path: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import wave

    from matplotlib.figure import Figure
    from visualdl import LogReader

    with_samples(tmp_path / "run")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    Figure(figsize=(1, 1)).savefig(tmp_path / "run" / "loss.png")
    with wave.open(str(tmp_path / "run" / "a.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(b"\x00\x40" * 800)
    for log in open_trackers(["visualdl", "tensorboard"], tmp_path / "logs"):
        log.on_train_begin(a_run(tmp_path / "run"))
        log.on_evaluate(EVALUATED)
        log.on_train_end(RESULT)
        log.close()
    assert not logged
    (file,) = (tmp_path / "logs").glob("vdlrecords*")
    reader = LogReader(file_path=str(file))
    assert set(reader.get_tags()["text"]) == {"config", "environment", "samples", "model card"}
    assert reader.get_tags()["image"] == ["loss"] and reader.get_tags()["audio"] == ["samples/1"]
    (shown,) = reader.get_data("text", "samples")
    assert "why?" in shown.text.encoded_text_string and SECRET not in shown.text.encoded_text_string
    (events,) = (tmp_path / "logs").glob("events*")
    content = events.read_bytes()
    assert b"samples/1" in content and b"\x89PNG" in content and b"RIFF" in content and SECRET.encode() not in content


def test_a_tracker_that_cannot_be_opened_is_left_out(
    tmp_path: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(folder: Path) -> None:
        raise RuntimeError("protobuf is too new")

    monkeypatch.setitem(TRACKERS, "visualdl", TRACKERS["visualdl"]._replace(open=broken))
    assert open_trackers(["visualdl"], tmp_path) == []
    (warning,) = logged
    assert "visualdl cannot be opened: protobuf is too new; the run goes on without it" in warning


def test_a_folder_of_runs_is_no_installed_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "swanlab").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed_trackers(["swanlab", "visualdl"]) == ["visualdl"]


def test_what_is_reported(tmp_path: Path) -> None:
    assert training_figures(RECORD) == {"train/loss": 2.5, "train/tokens": 100.0}
    assert evaluation_figures(EVALUATED)["eval/a/loss"] == 1.0
    assert samples_of(tmp_path, {"eval_loss": 1.0}) == [] == samples_of(tmp_path, EVALUATED)
    assert SECRET not in json.dumps(facts_of(a_run(tmp_path / "run")))
    assert card_of(a_run(tmp_path / "run"), RESULT)["name"] == "run"

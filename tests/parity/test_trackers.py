"""The libraries of trackers read back what a run has told them, without a network."""

from __future__ import annotations

import json
import os
import subprocess
import wave
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from erniekit.training.callbacks.tracker_process import TrackerProcess
from tests.training.test_trackers import EVALUATED, RECORD, RESULT, SECRET, a_run, with_samples

pytestmark = pytest.mark.parity
ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("ERNIEKIT_TRACKERS", ROOT / ".venv-trackers/bin/python"))
MEDIA = {"wandb": "wandb/*/files/media", "mlflow": "*/*/artifacts", "swanlab": "run-*/media", "trackio": "media"}


@pytest.fixture(params=["wandb", "mlflow", "swanlab", "trackio"])
def reported(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> tuple[str, Path, dict[str, Any]]:
    """A tracker, the folder of what its library wrote of a whole run, and what that reads there."""
    if not PYTHON.is_file():
        pytest.skip("make parity installs the clients of trackers")
    name = request.param
    values = {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    for variable, value in (values | {"WANDB_API_KEY": SECRET}).items():
        monkeypatch.setenv(variable, value)
    folder = tmp_path / "run"
    with_samples(folder)
    Figure(figsize=(1, 1)).savefig(folder / "loss.png")
    with wave.open(str(folder / "a.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(b"\x00\x40" * 800)
    tracker = TrackerProcess(name, folder / "logs", python=str(PYTHON), end_seconds=100.0)
    tracker.on_train_begin(a_run(folder))
    tracker.on_log(RECORD)
    tracker.on_evaluate(EVALUATED)
    tracker.on_train_end(RESULT)
    tracker.close()
    assert not [line for line in logged if line.startswith("warning")]
    command = [str(PYTHON), str(ROOT / "tests/parity/read_tracker.py"), name, str(folder / "logs" / name)]
    read = subprocess.run(command, capture_output=True, text=True, check=True)
    return name, folder / "logs" / name, json.loads(read.stdout.splitlines()[-1])


def test_a_tracker_reads_back_a_run(reported: tuple[str, Path, dict[str, Any]]) -> None:
    name, folder, read = reported
    text = json.dumps(read)
    if name == "swanlab":
        for word in ("train/loss", "eval/a/loss", "samples", "sounds", "pictures/loss", "model_card"):
            assert word in text
        assert "2.5" in text and "learning_rate" in read["config"] and "environment" in read["config"]
    else:
        assert (read["figures"]["train/loss"], read["figures"]["eval/a/loss"]) == (2.5, 1.0)
        assert float(read["config"]["learning_rate"]) == 0.05
    if name == "mlflow":
        assert read["steps"] == [4] and read["status"] == "FINISHED" and read["card"]["name"] == "run"
        assert read["tags"]["erniekit.cores"] and not any("git" in tag for tag in read["tags"])
    elif name == "wandb":
        assert "model_card" in "".join(read["card"]) and read["config"]["environment"]["cores"]
    elif name == "trackio":
        assert 4 in read["steps"] and "model_card" in read["figures"]
    media = [path for place in folder.glob(MEDIA[name]) for path in place.rglob("*")]
    kinds = {path.suffix for path in media if path.is_file()}
    assert {".png", ".wav"} <= kinds
    written = [
        path for path in folder.parents[1].parent.rglob("*") if path.is_file() and path.parent != folder.parents[1]
    ]
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]

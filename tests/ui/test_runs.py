"""Runs: found, followed, told, and processes of their own."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from erniekit.errors import ConfigurationError
from erniekit.ui import detached
from erniekit.ui.workspace import STATE

HOLD = (
    "import fcntl, sys; file = open(sys.argv[1], 'a')\n"
    "fcntl.lockf(file, fcntl.LOCK_EX); print('held', flush=True); input()"
)


def write_log(folder: Path, output: str, losses: list[float]) -> Path:
    log = folder / output / "training_log.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step + 1, "loss": loss, "learning_rate": 1e-3}) for step, loss in enumerate(losses)]
    log.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return log


@pytest.fixture
def held(folder: Path) -> Any:
    """A folder that a run of another process has locked."""
    write_log(folder, "out/live", [2.0])
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder / "out/live/.erniekit.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield folder / "out" / "live"
    process.communicate("")


def test_runs_of_the_folder_are_found(client: TestClient, folder: Path) -> None:
    write_log(folder, "out/a", [2.0, 1.5])
    write_log(folder, ".hidden/b", [1.0])
    (run,) = client.get("/api/runs").json()
    assert (run["output"], run["state"], run["code"], run["ours"]) == ("out/a", "ended", None, False)


def test_records_come_as_they_are_written(client: TestClient, folder: Path) -> None:
    log = write_log(folder, "out/a", [2.0, 1.5])
    first = client.get("/api/run", params={"output": "out/a"}).json()
    assert [record["loss"] for record in first["records"]] == [2.0, 1.5] and first["fresh"]
    with log.open("a") as file:
        file.write('{"step": 3, "loss": 1.2}\n{"step": 4, "lo')
    second = client.get("/api/run", params={"output": "out/a", "cursor": first["cursor"]}).json()
    assert [record["step"] for record in second["records"]] == [3] and not second["fresh"]
    log.unlink()
    write_log(folder, "out/a", [9.0])  # the run began anew
    third = client.get("/api/run", params={"output": "out/a", "cursor": second["cursor"]}).json()
    assert [record["loss"] for record in third["records"]] == [9.0] and third["fresh"]


def test_samples_results_and_parameters_are_shown(client: TestClient, folder: Path) -> None:
    write_log(folder, "out/a", [2.0])
    (folder / "out/a/eval_samples.jsonl").write_text('{"answer": "7", "expected": "8"}\n')
    (folder / "out/a/eval_results.json").write_text('{"eval_loss": 1.0}')
    (folder / "out/a/training_config.yaml").write_text("seed: 7\n")
    run = client.get("/api/run", params={"output": "out/a"}).json()
    assert run["samples"] == [{"answer": "7", "expected": "8"}] and run["results"] == {"eval_loss": 1.0}
    assert client.get("/api/run/parameters", params={"output": "out/a"}).json() == {"seed": 7}


@pytest.mark.parametrize("output", ["../x", "/tmp", "none", ".erniekit-ui"])
def test_folders_that_are_no_run_are_refused(client: TestClient, output: str) -> None:
    assert client.get("/api/run", params={"output": output}).status_code in (403, 422)
    assert client.post("/api/run/command", json={"output": output, "command": "quit"}).status_code in (403, 422)


def test_commands_reach_a_run_that_goes_on(client: TestClient, held: Path) -> None:
    assert client.get("/api/runs").json()[0]["state"] == "running"
    told = client.post("/api/run/command", json={"output": "out/live", "command": "LR 1e-4"}).json()["told"]
    assert "before the next step" in told and (held / "control").read_text() == "lr 0.0001\n"
    answer = client.post("/api/run/command", json={"output": "out/live", "command": "explode"})
    assert answer.status_code == 422 and "the commands are" in answer.json()["error"]
    with (held / ".erniekit.lock").open("a") as file, pytest.raises(OSError):  # looking has not taken the lock away
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_commands_to_a_run_that_is_over_are_refused(client: TestClient, folder: Path) -> None:
    write_log(folder, "out/a", [2.0])
    answer = client.post("/api/run/command", json={"output": "out/a", "command": "save"})
    assert answer.status_code == 422 and "no run is writing there" in answer.json()["error"]
    assert not (folder / "out/a/control").exists()


def test_a_started_process_outlives_the_one_that_started_it(folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from erniekit.ui import detached\n"
        "run = detached.start(['version'], Path.cwd(), output='out/x', file='sft.yaml'); print(run.id)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=folder)
    (run,) = detached.started_runs(folder)
    assert run.id == result.stdout.strip() and run.output == "out/x"
    _wait_until(lambda: detached.exit_code(run, folder) == 0)
    from erniekit import __version__

    assert detached.output_tail(run, folder) == f"erniekit {__version__}\n" and not detached.is_alive(run)


def test_a_process_id_of_somebody_else_is_not_taken_for_the_run(folder: Path) -> None:
    own = detached._born(1)
    run = detached.Started("x", "out", "a.yaml", 1, own, 0.0)
    assert detached.is_alive(run) and not detached.is_alive(detached.Started("x", "out", "a.yaml", 1, "7", 0.0))


def test_broken_records_of_runs_are_passed_over(client: TestClient, folder: Path) -> None:
    for name, text in (("1", "{"), ("2", "{}"), ("3", '{"id": "x", "other": 1}'), ("4", "[1]")):
        (folder / STATE / name).mkdir(parents=True)
        (folder / STATE / name / "run.json").write_text(text)
    assert client.get("/api/runs").json() == []


def test_only_saved_and_valid_configurations_are_started(client: TestClient, folder: Path) -> None:
    for path, code in (("none.yaml", 422), ("../x.yaml", 403), ("data/train.jsonl", 422)):
        assert client.post("/api/run/start", json={"path": path}).status_code == code
    (folder / "sft.yaml").write_text((folder / "sft.yaml").read_text() + "max_steps: 5\n")
    answer = client.post("/api/run/start", json={"path": "sft.yaml"})
    assert answer.status_code == 422 and "written twice" in answer.json()["error"]
    assert not (folder / STATE).exists()


@pytest.mark.slow
def test_a_run_is_started_followed_and_ended(client: TestClient, folder: Path) -> None:
    text = (folder / "sft.yaml").read_text().replace("max_steps: 4", "max_steps: 100000\nlogging_steps: 1")
    (folder / "sft.yaml").write_text(text)
    started = client.post("/api/run/start", json={"path": "sft.yaml"}).json()
    assert started["output"] == "out/sft" and started["state"] == "starting"
    assert client.post("/api/run/start", json={"path": "sft.yaml"}).status_code == 422

    def state() -> dict[str, Any]:
        return dict(client.get("/api/run", params={"output": "out/sft"}).json())

    _wait_until(lambda: len(state()["records"]) >= 2, 60)
    assert state()["state"] == "running" and state()["total"] == 100_000
    assert client.post("/api/run/command", json={"output": "out/sft", "command": "quit"}).status_code == 200
    _wait_until(lambda: state()["state"] == "ended", 60)
    run = state()
    assert run["code"] == 0 and "saved" in run["output_tail"]


def _wait_until(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_records_in_a_folder_of_somebody_else_are_not_believed(folder: Path) -> None:
    (folder / "theirs").mkdir()
    (folder / STATE).symlink_to(folder / "theirs")
    record = {"id": "x", "output": "out", "file": "a.yaml", "process": 1, "born": detached._born(1), "at": 0.0}
    (folder / "theirs" / "x").mkdir()
    (folder / "theirs" / "x" / "run.json").write_text(json.dumps(record))
    assert detached.started_runs(folder) == []
    with pytest.raises(ConfigurationError, match="is not a folder of yours"):
        detached.start(["version"], folder, output="out/x", file="sft.yaml")

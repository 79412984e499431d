"""Jobs whose ranks train on different data: faults, restarts, signals (several machines: test_several_machines.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.config import Config
from erniekit.launch.job import Job, run_job
from erniekit.log import console_logging
from tests.distributed.processes import wait_for_the_end
from tests.distributed.warm_processes import warm_starts

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]
VARIABLES = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
LIMIT = 15.0  # seconds from a fault to the end of the job
MakeConfig = Callable[..., Config]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def run(make_config: MakeConfig, capfd: pytest.CaptureFixture) -> Callable[..., tuple[int, str, str]]:
    """Run a job of two ranks, or of one, with a fault in the last; its exit code and what it showed."""

    def run(fault: str, *, step: int = 2, here: int = 2, **parameters: Any) -> tuple[int, str, str]:
        config = make_config(**{"max_steps": 6, "save_strategy": "steps", "save_steps": 2, **parameters})
        words = ("train", str(config.path))
        command = (sys.executable, "-m", "tests.runners.faulty_rank", fault, str(here - 1), str(step), *words)
        output = Path(config.basic.output_dir)
        with console_logging(), warm_starts():
            code = run_job(Job(config, command, here, False, output / "rank_logs"))
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def launch(capfd: pytest.CaptureFixture) -> Callable[..., None]:
    """`erniekit train` on so many ranks, which end well and say nothing of errors."""

    def launch(config: Config, nproc: int = 2) -> None:
        command = (sys.executable, "-m", "erniekit", "train", str(config.path))
        with warm_starts():
            code = run_job(Job(config, command, nproc, False, Path(config.basic.output_dir) / "rank_logs"))
        assert (code, capfd.readouterr().err) == (0, "")

    return launch


def seconds_since_step(output: Path, step: int) -> float:
    """How long ago the checkpoint of a step was written; a fault comes right after it."""
    return time.time() - (output / f"checkpoint-{step}" / "manifest.json").stat().st_mtime


def log(output: Path) -> list[dict]:
    lines = [json.loads(line) for line in (output / "training_log.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


@pytest.mark.parametrize(
    ("fault", "code", "shown"),
    [
        ("raises", 1, "[rank 1] ValueError: the seventh sample is bad\n"),
        ("exits", 3, "error: rank 1 ended with exit code 3\n"),
        ("is_killed", 137, "error: rank 1 was killed by SIGKILL"),
        ("refuses", 2, "error: step 2: this data cannot be trained on\n"),
    ],
)
def test_a_rank_that_ends_ends_the_job(fault: str, code: int, shown: str, run: Callable, tmp_path: Path) -> None:
    found, _, error = run(fault)
    assert seconds_since_step(tmp_path / "run", 2) < LIMIT
    assert found == code
    assert shown in error
    assert "RankLostError" not in error  # what rank 0 noticed is not shown
    if fault == "refuses":
        assert error == shown
    if fault == "raises":
        assert "error: rank 1 failed\n[rank 1] Traceback (most recent call last):" in error
        assert "RankLostError" in (tmp_path / "run/rank_logs/rank-0.log").read_text()


@pytest.mark.proves("distributed_timeout")
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hangs", "is_stopped"])
def test_a_rank_that_hangs_past_the_timeout_ends_the_job(fault: str, run: Callable, tmp_path: Path) -> None:
    timeout = 8
    code, _, error = run(fault, distributed_timeout=timeout)
    assert timeout < seconds_since_step(tmp_path / "run", 2) < timeout + LIMIT
    assert code == 1
    silent = f"rank 0: rank 1 has sent nothing for {timeout} s"
    if fault == "hangs":
        assert "error: rank 1 hangs: " in error and silent in error
        assert "in hangs\n" in error and "faulty_rank.py" in error  # where
    else:
        assert "error: rank 1 hangs and does not answer: " in error and silent in error


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_degree": 2},
        {"pipeline_parallel_degree": 2, "gradient_accumulation_steps": 4},
        {"sharding": "stage3", "sharding_parallel_degree": 2},
    ],
)
def test_a_rank_that_ends_within_a_step_ends_the_job(layout: dict, run: Callable, tmp_path: Path) -> None:
    code, _, error = run("is_killed_in_backward", **layout)
    assert seconds_since_step(tmp_path / "run", 2) < LIMIT
    assert code == 137 and error.startswith("error: rank 1 was killed by SIGKILL"), error
    assert "RankLostError" in (tmp_path / "run/rank_logs/rank-0.log").read_text()


@pytest.mark.slow
def test_a_slow_rank_is_not_a_fault(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run("is_slow", step=99)[0], log(tmp_path / "run")
    monkeypatch.setenv("SECONDS", "33")  # gloo would give up after 30
    code, _, error = run("is_slow", overwrite_output_dir=True)
    assert (code, error) == (0, "")
    assert [line["loss"] for line in log(tmp_path / "run")] == [line["loss"] for line in plain[1]]


@pytest.mark.slow
@pytest.mark.parametrize("here", [1, 2])
def test_a_job_starts_again_from_its_newest_checkpoint(here: int, run: Callable, tmp_path: Path) -> None:
    assert run("raises", step=99, here=here)[0] == 0
    plain = [line["loss"] for line in log(tmp_path / "run")]
    code, out, error = run("is_killed", step=5, here=here, max_restarts=1, overwrite_output_dir=True)
    assert code == 0
    assert f"error: rank {here - 1} was killed" in error and "restart 1 of 1: from" in out and "checkpoint-4" in out
    assert [line["loss"] for line in log(tmp_path / "run")] == plain


def started(config: Config, *words: str, nproc: int = 2, **variables: str) -> subprocess.Popen:
    """`erniekit train`, or other words, as a user starts it."""
    command = words or ("-m", "erniekit", "train", str(config.path), "--nproc", str(nproc))
    return subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, **VARIABLES, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path, lines: int = 1) -> list[str]:
    ends = time.monotonic() + 60
    while not path.exists() or len(path.read_text().splitlines()) < lines:
        assert time.monotonic() < ends, f"{path} did not appear"
        time.sleep(0.05)
    return path.read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_run_with_a_checkpoint(
    number: signal.Signals, code: int, make_config: MakeConfig, launch: Callable
) -> None:
    config = make_config(max_steps=5000, save_strategy="steps", save_steps=100_000)
    output = Path(config.basic.output_dir)
    job = started(config)
    wait_for(output / "training_log.jsonl", lines=3)
    job.send_signal(number)
    out, error = job.communicate(timeout=30)
    assert (job.returncode, error) == (code, "")
    stopped = max(int(path.name.removeprefix("checkpoint-")) for path in output.glob("checkpoint-*"))
    assert f"stopped after step {stopped}; continue with resume_from_checkpoint=true" in out
    finished = make_config(max_steps=stopped + 2, resume_from_checkpoint=True)
    launch(finished)
    assert log(output)[-1]["step"] == stopped + 2


def test_no_rank_outlives_a_launcher_that_is_killed(make_config: MakeConfig, tmp_path: Path) -> None:
    config, pid_file = make_config(max_steps=100_000), tmp_path / "told"
    program = (
        "import sys; from erniekit.config import Config; from pathlib import Path\n"
        "from erniekit.launch.job import Job, run_job\n"
        f"config = Config.load({str(config.path)!r}, verb='train')\n"
        "rank = (sys.executable, '-m', 'tests.runners.faulty_rank', 'tells_its_number', 'every', '1', 'train')\n"
        f"run_job(Job(config, (*rank, str(config.path)), 2, False, Path({str(tmp_path)!r})))"
    )
    job = started(config, "-c", program, TELL=str(pid_file))
    pids = wait_for(pid_file, lines=2)
    job.kill()
    job.communicate()
    for pid in pids:
        wait_for_the_end(pid)


@pytest.mark.slow
def test_under_paddles_own_launcher(make_config: MakeConfig, launch: Callable, tmp_path: Path) -> None:
    ours = make_config(output_dir=str(tmp_path / "ours"))
    launch(ours)
    config = make_config(output_dir=str(tmp_path / "paddles"))
    words = ("--nproc_per_node", "2", "--log_dir", str(tmp_path / "logs"), str(ROOT / "erniekit/__main__.py"))
    job = started(config, "-m", "paddle.distributed.launch", *words, "train", str(config.path))
    shown, error = job.communicate(timeout=90)
    assert job.returncode == 0, error
    assert "tcp_store" not in shown + error  # Paddle's notes on how ranks connect
    assert [line["loss"] for line in log(tmp_path / "paddles")] == [line["loss"] for line in log(tmp_path / "ours")]


@pytest.mark.slow
def test_ranks_evaluate_as_one(make_config: MakeConfig, launch: Callable, records: Path, tmp_path: Path) -> None:
    """Two ranks on different samples, and two on slices of the model."""
    figures: list[dict[str, float]] = []
    slices = {"tensor_parallel_degree": 2, "sequence_parallel": False}
    for nproc, layout in ((1, {}), (2, {}), (2, slices)):
        output = tmp_path / str(len(figures))
        words = {"do_train": False, "do_eval": True, "max_evaluate_steps": -1, "output_dir": str(output)}
        config = make_config(eval_dataset_path=str(records), **words, **layout)
        launch(config, nproc)
        figures.append(json.loads((output / "eval_results.json").read_text()))
    alone, *divided = figures
    for found in divided:
        assert found["eval_batches"] == alone["eval_batches"] > 2
        for name in ("eval_loss", "eval_perplexity", "eval_token_accuracy"):
            assert found[name] == pytest.approx(alone[name], rel=1e-5)

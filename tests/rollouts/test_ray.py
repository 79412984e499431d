"""Rollout workers in processes of a real Ray on this machine (`make test-ray`)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from tests.runners.test_policy import answer_prompts, prompts, rollouts, tensors  # noqa: F401 (fixtures)

pytestmark = pytest.mark.ray

Run = Callable[..., Any]
WIDE = {"gradient_accumulation_steps": 4, "max_steps": 3}  # four prompts of four answers
ROOT = Path(__file__).parents[2]
DEADLINE = 300.0  # seconds, for what must happen at all
OF_RAY = ("raylet", "gcs_server", "ray::", "site-packages/ray/")  # in the command lines of its processes


def command_lines(session: int) -> dict[int, str]:
    """The processes of Ray in a session of the system, by id; not those of a program `-c` that may name its folders."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().decode().split("\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        line = "" if "-c" in arguments else " ".join(arguments)
        if int(state[3]) == session and state[0] != "Z" and any(word in line for word in OF_RAY):
            found[int(folder.name)] = line
    return found


def wait_until(happened: Callable[[], Any], what: str) -> Any:
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until:
        if result := happened():
            return result
        time.sleep(0.1)
    raise AssertionError(f"{what} has not happened")


def assert_nothing_is_left(session: int, before: Iterable[int] = ()) -> None:
    """But the processes that were there before."""
    until = time.monotonic() + DEADLINE
    while left := {process: line for process, line in command_lines(session).items() if process not in before}:
        assert time.monotonic() < until, f"these have not ended: {left}"
        time.sleep(0.1)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = {*command_lines(os.getsid(0))}
    yield
    assert_nothing_is_left(os.getsid(0), before)


def assert_equal_runs(run: Any, lines: list[dict[str, Any]], weights: dict[str, np.ndarray]) -> None:
    assert rollouts(run.output) == lines
    for name, values in tensors(run.output).items():
        np.testing.assert_array_equal(values, weights[name], err_msg=name)


def listening_addresses(processes: set[int]) -> set[str]:
    """The addresses that processes listen on, as the kernel writes them."""
    inodes = set()
    for process in processes:
        for link in Path(f"/proc/{process}/fd").iterdir():
            try:
                inodes.add(os.readlink(link))
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].partition(":")[0])
    return found


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def test_rollouts_are_those_of_one_process(answer_prompts: Run, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """And so are the weights, to the bit; with 1, 2 and 3 workers, one of which is killed. Ray listens on no address
    but the loopback one."""
    from erniekit.rollouts.workers import RolloutWorkers

    alone = answer_prompts(**WIDE)
    lines, weights = rollouts(alone.output), tensors(alone.output)
    for workers in (1, 2):
        run = answer_prompts(**WIDE, rollout_workers=workers)
        assert_equal_runs(run, lines, weights)
        assert f"rollout workers: {workers} on {os.uname().nodename}; started in " in run.said
    send, sent, addresses = RolloutWorkers.send, [], set()

    def killing(self: RolloutWorkers, model: Any, fingerprint: str) -> None:
        send(self, model, fingerprint)
        sent.append(fingerprint)
        addresses.update(listening_addresses(command_lines(os.getsid(0)).keys() | {os.getpid()}))
        if len(sent) == 2:
            os.kill(self.processes()[1], signal.SIGKILL)

    monkeypatch.setattr(RolloutWorkers, "send", killing)
    run = answer_prompts(**WIDE, rollout_workers=3)
    assert_equal_runs(run, lines, weights)
    assert run.said.count("another one is started, and samples its answers again") == 1
    assert "rollout worker 1 on " in run.said
    assert addresses and addresses <= LOOPBACK


def test_a_run_resumes_with_workers_as_without(answer_prompts: Run) -> None:  # noqa: F811
    """Adapters, in the middle of a rollout's updates."""
    several = {
        "steps_per_generation": 2, "num_iterations": 2, "max_steps": 6, "save_strategy": "steps", "save_steps": 3,
        "lora": True, "lora_rank": 4,
    }  # fmt: skip
    whole = answer_prompts(**several)
    lines, weights = rollouts(whole.output), tensors(whole.output)
    resumed = answer_prompts(
        **several,
        rollout_workers=2,
        resume_from_checkpoint=str(whole.output / "checkpoint-3"),
        overwrite_output_dir=True,
    )
    assert_equal_runs(resumed, lines, weights)


def test_a_worker_that_cannot_live_ends_the_run(answer_prompts: Run, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    from erniekit.errors import TrainingError
    from erniekit.rollouts.workers import RolloutWorkers

    add = RolloutWorkers._add

    def adding(self: RolloutWorkers, numbers: Any) -> None:
        add(self, numbers)
        os.kill(self.processes()[0], signal.SIGKILL)

    monkeypatch.setattr(RolloutWorkers, "_add", adding)
    with pytest.raises(TrainingError, match=r"worker 0 on .* has died .*, for the second time with the same prompts"):
        answer_prompts(rollout_workers=1)


@pytest.mark.distributed
def test_ranks_share_the_workers_of_the_first(
    answer_prompts: Run,  # noqa: F811
    train_on_ranks: Run,
    tiny_base: Path,
    prompts: Path,  # noqa: F811
) -> None:
    values = {
        "stage": "GRPO", "model_name_or_path": str(tiny_base), "continue_training": True,
        "train_dataset_path": str(prompts), "rewards": ["length:1-12"], "num_generations": 4,
        "per_device_train_batch_size": 4, "max_completion_len": 8, "learning_rate": 1e-3, "max_steps": 3,
        "sharding": "stage1", "sharding_parallel_degree": 2,
    }  # fmt: skip
    divided = train_on_ranks(nproc=2, **values)
    lines, weights = rollouts(divided.output), tensors(divided.output)
    assert_equal_runs(train_on_ranks(nproc=2, **values, rollout_workers=2), lines, weights)


@pytest.fixture
def start_training(tiny_base: Path, prompts: Path, tmp_path: Path) -> Callable[..., subprocess.Popen[bytes]]:  # noqa: F811
    """Start `erniekit train` in a session of its own, without an end of its own."""

    def start(**parameters: Any) -> subprocess.Popen[bytes]:
        values = {
            "stage": "GRPO", "model_name_or_path": str(tiny_base), "continue_training": True, "report_to": "none",
            "train_dataset_path": str(prompts), "rewards": ["length:1-12"], "num_generations": 4, "max_seq_len": 128,
            "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_completion_len": 8,
            "learning_rate": 1e-3, "max_steps": 10**6, "output_dir": str(tmp_path / "run"), "logging_steps": 1,
            "data_cache_dir": str(tmp_path / "cache"), "rollout_workers": 2, **parameters,
        }  # fmt: skip
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(values))
        with open(tmp_path / "log", "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "erniekit", "train", str(path)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    return start


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ((signal.SIGINT,), {130}),
        ((signal.SIGINT, signal.SIGINT), {130, -signal.SIGINT}),
        ((signal.SIGKILL,), {-signal.SIGKILL}),
    ],
    ids=["Ctrl-C", "Ctrl-C twice", "kill"],
)
def test_nothing_outlives_a_run_that_is_ended(
    start_training: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, signals: tuple[int, ...], code: set[int]
) -> None:
    """Ctrl-C reaches all processes of the terminal; SIGKILL the run alone."""
    process = start_training()
    try:
        lines = tmp_path / "run" / "training_log.jsonl"
        wait_until(lambda: process.poll() is not None or (lines.is_file() and lines.stat().st_size), "the first step")
        assert process.poll() is None, (tmp_path / "log").read_text()
        assert command_lines(process.pid)
        for number in signals:
            (os.kill if number == signal.SIGKILL else os.killpg)(process.pid, number)
        process.wait(DEADLINE)
        said = (tmp_path / "log").read_text()
        assert process.returncode in code, said
        assert "Traceback" not in said
        assert_nothing_is_left(process.pid)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Ray of this machine with two processors that `ray start` has started, in another folder."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    # what the run inherits, too: its sockets are on the loopback address, which is not Ray's choice, and it has a token
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    environment = {**os.environ, "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    given = [f"--port={port}", "--num-cpus=2", "--num-gpus=0", "--include-dashboard=false", "--disable-usage-stats"]
    log = tmp_path / "ray.log"
    with tempfile.TemporaryDirectory(prefix="rays-") as folder, open(log, "wb") as said:
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--temp-dir={folder}", *given],
            stdout=said, stderr=said, env=environment, start_new_session=True, cwd=folder,
        )  # fmt: skip
        try:
            wait_until(lambda: "Ray runtime started" in log.read_text() or process.poll() is not None, "Ray's start")
            assert process.poll() is None, log.read_text()
            yield f"127.0.0.1:{port}"
            assert process.poll() is None and command_lines(process.pid)
        finally:
            process.terminate()
            process.wait(DEADLINE)
            assert_nothing_is_left(process.pid)


def test_workers_of_a_cluster_that_others_have_started(
    start_training: Callable[..., subprocess.Popen[bytes]], tiny_base: Path, tmp_path: Path, cluster: str
) -> None:
    """It goes on afterwards, and refuses more workers than it has processors."""
    model = os.path.relpath(tiny_base)
    alone = SimpleNamespace(output=tmp_path / "alone")
    assert start_training(**WIDE, rollout_workers=0, output_dir=str(alone.output)).wait(DEADLINE) == 0
    run = SimpleNamespace(output=tmp_path / "run")
    given = {**WIDE, "model_name_or_path": model, "ray_address": cluster}
    assert start_training(**given).wait(2 * DEADLINE) == 0, (tmp_path / "log").read_text()
    assert_equal_runs(run, rollouts(alone.output), tensors(alone.output))
    assert start_training(**given, rollout_workers=3, output_dir=str(tmp_path / "third")).wait(DEADLINE) == 2
    told = "the cluster has 2 processors, and each of 3 rollout_workers takes one"
    assert told in (tmp_path / "log").read_text()

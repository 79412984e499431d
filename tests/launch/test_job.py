"""Jobs of several ranks: how many start, what is shown of them, signals, restarts, several machines.

The ranks run a small program (rank_program.py); tests/runners/test_ranks_train.py has ranks that train.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from erniekit.config import Config
from erniekit.errors import ConfigurationError, DataError
from erniekit.launch import job
from erniekit.launch.job import Job, plan_job, run_job
from erniekit.launch.local import RankProcesses, free_port, visible_gpus
from erniekit.launch.rendezvous import Rendezvous
from erniekit.training.checkpoint.atomic_folder import write_folder
from tests.distributed.processes import wait_for_the_end

PROGRAM = Path(__file__).with_name("rank_program.py")
ROOT = Path(__file__).parents[2]
MakeConfig = Callable[..., Config]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("NNODES", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "PADDLE_TRAINER_ID"):
        monkeypatch.delenv(name, raising=False)


def job_of(
    config: Config, behaviour: str, *words: str, nproc_per_node: int = 2, rendezvous: Rendezvous | None = None
) -> Job:
    output = Path(config.basic.output_dir)
    output.mkdir(exist_ok=True)
    command = (sys.executable, str(PROGRAM), behaviour, str(output), *words)
    return Job(config, command, nproc_per_node, False, rendezvous, output / "rank_logs")


def ranks(config: Config, nproc: int | None = None) -> int:
    job = plan_job(config, ("command",), nproc=nproc, logs=None)
    return 1 if job is None else job.nproc_per_node


def test_one_process_where_nothing_asks_for_more(make_config: MakeConfig) -> None:
    assert ranks(make_config()) == 1 == ranks(make_config(), 1)


def test_the_layout_says_how_many(make_config: MakeConfig) -> None:
    config = make_config(tensor_parallel_degree=2, pipeline_parallel_degree=2)
    assert ranks(config) == 4 and ranks(config, 8) == 8
    with pytest.raises(ConfigurationError, match="6 ranks cannot be divided by the layout"):
        ranks(config, 6)
    with pytest.raises(ConfigurationError, match="1 ranks cannot be divided"):
        ranks(config, 1)


def test_one_rank_is_a_job_where_it_may_be_started_again(make_config: MakeConfig) -> None:
    job = plan_job(make_config(max_restarts=1), ("command",), nproc=None, logs=None)
    assert job is not None and job.nproc_per_node == 1


def test_nproc_says_how_many(make_config: MakeConfig) -> None:
    assert ranks(make_config(), 3) == 3


def test_a_rank_starts_no_ranks(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    assert ranks(make_config()) == 1
    with pytest.raises(ConfigurationError, match="--nproc 2: this process is rank 1 of a job already"):
        ranks(make_config(), 2)


def test_all_gpus_unless_the_configuration_names_one(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "visible_gpus", lambda: 4)
    assert ranks(make_config()) == 4
    assert ranks(make_config(), 2) == 2
    assert ranks(make_config(device="gpu:1")) == 1
    assert ranks(make_config(device="cpu")) == 1
    with pytest.raises(ConfigurationError, match="every rank needs a GPU of its own, and 4 can be seen"):
        ranks(make_config(), 8)


def test_every_node_starts_its_own(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNODES", "2")
    job = plan_job(make_config(), ("command",), nproc=None, logs=Path("elsewhere"))
    assert job is not None
    assert (job.nproc_per_node, job.rendezvous, job.logs) == (1, Rendezvous(2, ("127.0.0.1", 8080)), Path("elsewhere"))


def test_gpus_are_counted_without_paddle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(tmp_path) == 0  # this Paddle is built for CPUs
    monkeypatch.setattr("erniekit.launch.local.metadata.version", lambda name: "3.3.1")
    assert visible_gpus(tmp_path) == 2
    for chosen, count in (("1", 1), ("0,1", 2), ("0, 1, 2", 2), ("", 0), ("-1", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert visible_gpus(tmp_path) == count
    assert visible_gpus(tmp_path / "absent") == 0


@pytest.mark.distributed
def test_rank_0_is_shown_and_each_rank_has_a_log(
    make_config: MakeConfig, capfd: pytest.CaptureFixture, logged: list[str]
) -> None:
    job = job_of(make_config(), "say_who")
    assert run_job(job) == 0
    assert logged == [f"2 ranks (data 2); the output of each: {job.logs / 'rank-N.log'}"]
    shown = capfd.readouterr()
    assert shown.out.startswith("rank 0 of 2 at 127.0.0.1:") and shown.err == "rank 0 complains\n"
    for rank in range(2):
        header, *lines = (job.logs / f"rank-{rank}.log").read_text().splitlines()
        assert header.startswith("--- ") and header.endswith(f" rank {rank} of 2")
        complaint, who = sorted(lines)
        assert complaint == f"rank {rank} complains" and who.startswith(f"rank {rank} of 2")


@pytest.mark.distributed
def test_data_is_read_before_ranks_start(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, spawn = tmp_path / "cache", job.spawn
    cached: list[int] = []

    def spawn_and_look(*arguments: Any, **more: Any) -> RankProcesses:
        cached.append(len(list(cache.rglob("*.bin"))))
        return spawn(*arguments, **more)

    monkeypatch.setattr(job, "spawn", spawn_and_look)
    assert run_job(job_of(make_config(), "say_who")) == 0
    assert cached[0] > 0
    monkeypatch.setattr(job, "spawn", None)  # not called
    with pytest.raises(DataError, match="no-such"):
        run_job(job_of(make_config(train_dataset_path="no-such.jsonl"), "say_who"))


@pytest.mark.parametrize(
    ("changes", "logs", "message"),
    [
        ({"tensor_parallel_degree": 3}, "logs", "tensor_parallel_degree 3 does not divide num_attention_heads 4"),
        ({}, "file/logs", "file/logs: the output of the ranks cannot be written there: Not a directory\n  write"),
    ],
)
def test_no_rank_starts_where_something_does_not_fit(
    changes: dict, logs: str, message: str, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "spawn", None)  # not called
    (tmp_path / "file").touch()
    unfit = replace(job_of(make_config(**changes), "say_who", nproc_per_node=6), logs=tmp_path / logs)
    with pytest.raises(ConfigurationError, match=message):
        run_job(unfit)


@pytest.mark.distributed
def test_two_nodes_of_a_rank_each_are_announced(make_config: MakeConfig) -> None:
    found = on_two_nodes(make_config(), "say_who", nproc_per_node=1)
    said = sorted(line for _, out, _ in found for line in out.splitlines() if "of which" in line)
    assert ["node 0 of 2 runs rank 0;" in said[0], "node 1 of 2 runs rank 1;" in said[1]] == [True, True]
    assert all(", which only this machine can reach\n" in out for _, out, _ in found)


@pytest.mark.distributed
def test_a_failed_job_is_started_again_from_its_newest_checkpoint(
    make_config: MakeConfig, capsys: pytest.CaptureFixture, logged: list[str]
) -> None:
    job = job_of(make_config(max_restarts=1), "is_killed_once", "save=yes", "resume_from_checkpoint=false")
    output = Path(job.config.basic.output_dir)
    assert run_job(job) == 0
    assert json.loads((output / "attempt-1").read_text()) == ["save=yes", "resume_from_checkpoint=true"]
    assert logged[1:] == [f"restart 1 of 1: from {output / 'checkpoint-7'}"]
    assert capsys.readouterr().err.startswith("error: rank 1 was killed by SIGKILL")


@pytest.mark.distributed
def test_a_failed_job_that_has_saved_nothing_begins_as_it_began(make_config: MakeConfig, logged: list[str]) -> None:
    """A checkpoint of an earlier run in the same folder is none of this job."""
    job = job_of(make_config(max_restarts=1), "is_killed_once", "save=no")
    output = Path(job.config.basic.output_dir)
    write_folder(output / "checkpoint-9", lambda folder: (folder / "model").write_text("weights"))
    assert run_job(job) == 0
    assert json.loads((output / "attempt-1").read_text()) == ["save=no"]
    assert "this job has written no complete checkpoint, so it begins as it began" in logged[1]


@pytest.mark.distributed
def test_a_failed_job_is_not_started_again_unasked(make_config: MakeConfig) -> None:
    job = job_of(make_config(), "is_killed_once", "save=yes")
    assert run_job(job) == 137
    assert not (Path(job.config.basic.output_dir) / "attempt-1").exists()


@pytest.mark.proves("max_restarts")
@pytest.mark.distributed
def test_a_failed_job_is_started_again_as_often_as_asked(make_config: MakeConfig) -> None:
    job = job_of(make_config(max_restarts=2), "is_always_killed")
    assert run_job(job) == 137
    assert sorted((Path(job.config.basic.output_dir) / "starts").read_text()) == ["0"] * 3 + ["1"] * 3


@pytest.mark.distributed
def test_what_the_user_can_mend_is_not_tried_again(make_config: MakeConfig, capfd: pytest.CaptureFixture) -> None:
    job = job_of(make_config(max_restarts=2), "refuses")
    assert run_job(job) == 2
    assert capfd.readouterr().err == "error: this cannot be mended by starting again\n"  # once for both
    assert sorted((Path(job.config.basic.output_dir) / "starts").read_text()) == ["0", "1"]


LAUNCHER = """
import sys
from pathlib import Path
from erniekit.launch.rendezvous import Rendezvous
from erniekit.config import Config
from erniekit.launch.job import Job, run_job
from erniekit.log import console_logging
config, behaviour, here, port = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
config = Config.load(config, verb="train")
output = Path(config.basic.output_dir)
command = (sys.executable, PROGRAM, behaviour, str(output))
meeting = Rendezvous(2, ("127.0.0.1", port)) if port else None
with console_logging():
    sys.exit(run_job(Job(config, command, here, False, meeting, output / "rank_logs")))
"""


def start_launcher(config: Config, behaviour: str, nproc_per_node: int = 2, port: int = 0) -> subprocess.Popen:
    Path(config.basic.output_dir).mkdir(exist_ok=True)
    program = f"PROGRAM = {str(PROGRAM)!r}\n{LAUNCHER}"
    words = [sys.executable, "-c", program, str(config.path), behaviour, str(nproc_per_node), str(port)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until_ready(config: Config, count: int) -> None:
    ends = time.monotonic() + 30
    while len(list(Path(config.basic.output_dir).glob("ready-*"))) < count:
        assert time.monotonic() < ends
        time.sleep(0.05)


@pytest.mark.distributed
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_every_rank(number: signal.Signals, code: int, make_config: MakeConfig) -> None:
    config = make_config(max_restarts=3)
    launcher = start_launcher(config, "stops_when_asked")
    wait_until_ready(config, 2)
    launcher.send_signal(number)
    assert (launcher.wait(15), launcher.communicate()[1]) == (code, "")
    stopped = {path.name: path.read_text() for path in Path(config.basic.output_dir).glob("stopped-*")}
    assert stopped == {"stopped-0": number.name, "stopped-1": number.name}


@pytest.mark.distributed
def test_ranks_that_do_not_stop_are_ended_with_the_third_signal(make_config: MakeConfig) -> None:
    config = make_config()
    launcher = start_launcher(config, "does_not_stop")
    wait_until_ready(config, 2)
    for _ in range(3):
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert launcher.wait(5) == 130
    for path in Path(config.basic.output_dir).glob("ready-*"):
        wait_for_the_end(path.read_text())


def on_two_nodes(config: Config, behaviour: str, nproc_per_node: int = 2) -> list[tuple[int, str, str]]:
    port = free_port("127.0.0.1")
    launchers = [start_launcher(config, behaviour, nproc_per_node=nproc_per_node, port=port) for _ in range(2)]
    both = [(*launcher.communicate(timeout=30), launcher.returncode) for launcher in launchers]
    return sorted((code, out, err) for out, err, code in both)


@pytest.mark.distributed
def test_two_nodes_show_rank_0_on_its_node(make_config: MakeConfig) -> None:
    config = make_config()
    found = on_two_nodes(config, "say_who")
    assert [code for code, _, _ in found] == [0, 0]
    first, second = sorted((out for _, out, _ in found), key=len, reverse=True)
    assert "\n4 ranks (data 4), of which node 0 of 2 runs 0 to 1;" in first and "rank 0 of 4 at" in first
    assert "\n4 ranks (data 4), of which node 1 of 2 runs 2 to 3;" in second and "rank 2 of 4" not in second
    assert {out.splitlines()[0].rpartition(":")[0] for out in (first, second)} == {"2 nodes meet at 127.0.0.1"}
    logs = Path(config.basic.output_dir) / "rank_logs"
    masters = {log.read_text().split(" at ")[1].split()[0] for log in logs.iterdir()}
    assert len(list(logs.iterdir())) == 4 and len(masters) == 1


@pytest.mark.distributed
def test_two_nodes_start_again_after_a_failure_on_one(make_config: MakeConfig) -> None:
    found = on_two_nodes(make_config(max_restarts=1), "is_killed_once")
    assert [code for code, _, _ in found] == [0, 0]
    assert all(err.startswith("error: rank 1 was killed by SIGKILL") for _, _, err in found)


@pytest.mark.distributed
def test_two_nodes_end_with_a_failure_on_one(make_config: MakeConfig) -> None:
    started = time.monotonic()
    found = on_two_nodes(make_config(), "is_killed_once")
    assert [code for code, _, _ in found] == [137, 137]
    assert time.monotonic() - started < 15


@pytest.mark.distributed
def test_two_nodes_refuse_a_layout_that_does_not_fit_both(make_config: MakeConfig) -> None:
    config, port = make_config(tensor_parallel_degree=4), free_port("127.0.0.1")
    launchers = [start_launcher(config, "say_who", nproc_per_node=1, port=port) for _ in range(2)]
    for launcher in launchers:
        assert "ConfigurationError: 2 ranks cannot be divided by the layout" in launcher.communicate(timeout=30)[1]
        assert launcher.returncode
    assert not (Path(config.basic.output_dir) / "rank_logs").exists()  # none was started


@pytest.mark.distributed
def test_two_nodes_end_when_one_launcher_is_killed(make_config: MakeConfig) -> None:
    config, port = make_config(), free_port("127.0.0.1")
    launchers = [start_launcher(config, "does_not_stop", nproc_per_node=2, port=port) for _ in range(2)]
    wait_until_ready(config, 4)
    os.kill(launchers[0].pid, signal.SIGKILL)
    _, error = launchers[1].communicate(timeout=15)
    assert launchers[1].returncode == 1
    assert "is gone; the ranks of this node were ended" in error
    for path in Path(config.basic.output_dir).glob("ready-*"):
        wait_for_the_end(path.read_text())
    launchers[0].communicate()


def test_a_job_can_be_run_from_another_thread(make_config: MakeConfig) -> None:
    """Signals belong to the main thread; elsewhere a job is run without them."""
    codes: list[int] = []
    job = job_of(make_config(), "say_who")
    thread = threading.Thread(target=lambda: codes.append(run_job(job)))
    thread.start()
    thread.join()
    assert codes == [0]

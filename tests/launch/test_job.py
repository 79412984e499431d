"""Jobs of several ranks of one machine: how many start, what is shown of them, signals, restarts.

The ranks run a small program (rank_program.py); tests/runners/test_ranks_train.py has ranks that train.
"""

from __future__ import annotations

import json
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
from erniekit.errors import ConfigurationError, UserError
from erniekit.launch import job
from erniekit.launch.job import Job, plan_job, run_job
from erniekit.launch.local import RankProcesses, rank_variables, visible_gpus
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


def job_of(config: Config, behaviour: str, *words: str, nproc: int = 2) -> Job:
    output = Path(config.basic.output_dir)
    output.mkdir(exist_ok=True)
    command = (sys.executable, str(PROGRAM), behaviour, str(output), *words)
    return Job(config, command, nproc, False, output / "rank_logs")


def ranks(config: Config, nproc: int | None = None) -> int:
    job = plan_job(config, ("command",), nproc=nproc, logs=None)
    return 1 if job is None else job.nproc


def test_one_process_where_nothing_asks_for_more(make_config: MakeConfig) -> None:
    assert ranks(make_config()) == 1 == ranks(make_config(), 1)


def test_the_layout_says_how_many(make_config: MakeConfig) -> None:
    config = make_config(tensor_parallel_degree=2, pipeline_parallel_degree=2)
    assert ranks(config) == 4 and ranks(config, 8) == 8
    with pytest.raises(ConfigurationError, match="6 ranks cannot be divided by the layout"):
        ranks(config, 6)
    with pytest.raises(ConfigurationError, match="1 ranks cannot be divided"):
        ranks(config, 1)


def test_ranks_on_other_devices_are_started_by_paddles_launcher(make_config: MakeConfig) -> None:
    assert ranks(make_config(device="npu")) == 1
    command = ("python", "-m", "erniekit", "train", "sft.yaml")
    with pytest.raises(ConfigurationError, match=r"--devices 0,1 \"\$\(which erniekit\)\" train sft.yaml"):
        plan_job(make_config(device="npu", tensor_parallel_degree=2), command, nproc=None, logs=None)


def test_one_rank_is_a_job_where_it_may_be_started_again(make_config: MakeConfig) -> None:
    job = plan_job(make_config(max_restarts=1), ("command",), nproc=None, logs=None)
    assert job is not None and job.nproc == 1


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


def test_several_machines_are_refused_with_the_command_for_them(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (sys.executable, "-m", "erniekit", "train", "a config.yaml")
    for name, value in {"NNODES": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "99", "NODE_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as caught:
        plan_job(make_config(), command, nproc=None, logs=None)
    assert (
        "python -m paddle.distributed.launch --nnodes 2 --master 10.0.0.1:99 --rank 1 "
        "--host ADDRESS_OF_THIS_NODE --nproc_per_node RANKS_PER_NODE \"$(which erniekit)\" train 'a config.yaml'\n"
    ) in str(caught.value)
    monkeypatch.setenv("NNODES", "1")
    assert plan_job(make_config(), command, nproc=None, logs=None) is None


def test_a_rank_is_told_who_it_is() -> None:
    endpoints = ["127.0.0.1:7000", "127.0.0.1:7001", "127.0.0.1:7002"]
    assert rank_variables(1, endpoints, gpu=True) == {
        "FLAGS_selected_gpus": "1",
        "PADDLE_TRAINER_ID": "1",
        "PADDLE_TRAINERS_NUM": "3",
        "PADDLE_LOCAL_RANK": "1",
        "PADDLE_LOCAL_SIZE": "3",
        "PADDLE_MASTER": "127.0.0.1:7000",
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_CURRENT_ENDPOINT": "127.0.0.1:7001",
    }


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
    with pytest.raises(UserError, match=r"`train_dataset_path`: no-such\.jsonl does not exist"):
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
    unfit = replace(job_of(make_config(**changes), "say_who", nproc=6), logs=tmp_path / logs)
    with pytest.raises(ConfigurationError, match=message):
        run_job(unfit)


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
    job = job_of(make_config(max_restarts=1, overwrite_output_dir=True), "is_killed_once", "save=no")
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
from erniekit.config import Config
from erniekit.launch.job import Job, run_job
from erniekit.log import console_logging
config, behaviour = Path(sys.argv[1]), sys.argv[2]
config = Config.load(config, verb="train")
output = Path(config.basic.output_dir)
command = (sys.executable, PROGRAM, behaviour, str(output))
with console_logging():
    sys.exit(run_job(Job(config, command, 2, False, output / "rank_logs")))
"""


def start_launcher(config: Config, behaviour: str) -> subprocess.Popen:
    Path(config.basic.output_dir).mkdir(exist_ok=True)
    program = f"PROGRAM = {str(PROGRAM)!r}\n{LAUNCHER}"
    words = [sys.executable, "-c", program, str(config.path), behaviour]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until_ready(config: Config, count: int) -> None:
    ends = time.monotonic() + 30
    while len(list(Path(config.basic.output_dir).glob("ready-*"))) < count:
        assert time.monotonic() < ends
        time.sleep(0.05)


@pytest.mark.distributed
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
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


def test_what_a_killed_launcher_left_goes_with_the_next(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    (temporary / "erniekit-job-left").mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    assert run_job(job_of(make_config(), "say_who")) == 0
    assert list(temporary.iterdir()) == []


def test_a_job_can_be_run_from_another_thread(make_config: MakeConfig) -> None:
    """Signals belong to the main thread; elsewhere a job is run without them."""
    codes: list[int] = []
    job = job_of(make_config(), "say_who")
    thread = threading.Thread(target=lambda: codes.append(run_job(job)))
    thread.start()
    thread.join()
    assert codes == [0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ["training"]),
        ({"do_eval": True, "eval_dataset_path": "e"}, ["training", "evaluation"]),
        ({"do_train": False, "do_eval": True, "eval_dataset_path": "e"}, ["evaluation"]),
        ({"do_train": False, "do_eval": True, "eval_dataset_path": "e", "evaluation_strategy": "no"}, ["evaluation"]),
    ],
    ids=str,
)
def test_what_is_read_before_ranks_start(
    values: dict[str, Any], expected: list[str], make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(job, "open_tokenizer", lambda config: (None, None))
    monkeypatch.setattr(job, "initial_weights", lambda config: None)
    monkeypatch.setattr(job, "training_dataset", lambda *parts: read.append("training"))
    monkeypatch.setattr(job, "evaluation_dataset", lambda *parts: read.append("evaluation"))
    job.prepare(make_config(**values))
    assert read == expected

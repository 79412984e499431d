"""Which failure of several ranks is the cause, what is shown of it, and that nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from erniekit.launch.local import rank_log_path
from erniekit.launch.watch import Cause, Failure, hang_failures, root_cause, watch
from tests.distributed.cases import faults
from tests.distributed.processes import wait_for_the_end
from tests.distributed.ranks import ROOT, start_ranks


def first(case: Callable, folder: Path, count: int = 2, limit: float = 15, **arguments: object) -> Failure:
    """The first cause of a job that fails, within the time that a job may take to end."""
    started = time.monotonic()
    ranks = start_ranks(case, count, folder, **arguments)
    pids = [process.pid for process in ranks.processes.values()]
    try:
        failures = watch(ranks)
    finally:
        ranks.kill()
    assert time.monotonic() - started < limit
    for pid in pids:
        wait_for_the_end(pid)
    return root_cause(failures)


def failure(rank: int, cause: Cause, text: str = "") -> Failure:
    return Failure(rank, cause, "failed", text, 1)


def test_consequences_are_not_the_cause() -> None:
    order: list[Cause] = ["error", "hang", "stopped", "left", "silent", "lost"]
    for start in range(len(order)):
        seen = [failure(rank, cause) for rank, cause in enumerate(order[start:])][::-1]
        assert root_cause(seen).cause == order[start]
    assert root_cause([failure(3, "lost"), failure(2, "error"), failure(1, "user error")]).rank == 2  # came first


def test_a_rank_that_waits_too_does_not_hang() -> None:
    stacks = {
        0: 'File "erniekit/distributed/cpu_backend/mailboxes.py", line 97 in receive',
        1: 'File "train.py", line 3 in load',
        2: 'File "erniekit/distributed/init.py", line 70 in join_store',
        4: "",
    }
    wrapped = (
        "Traceback\nOSError: (External) {\n  RankTimeoutError: rank 3: rank 1 has sent nothing\n}\n (at py_layer.cc)"
    )
    noticed = [failure(3, "silent", wrapped)]
    found = hang_failures(stacks, noticed)
    assert [each.rank for each in found] == [1, 4]
    assert found[0].what == "hangs: RankTimeoutError: rank 3: rank 1 has sent nothing"
    assert found[1].what.startswith("hangs and does not answer: ")
    assert hang_failures(stacks, [failure(3, "lost")]) == []


@pytest.mark.distributed
def test_what_a_killed_rank_said_last_is_shown(tmp_path: Path) -> None:
    failure = first(faults.says_and_is_killed, tmp_path)
    assert (failure.rank, failure.cause, failure.code) == (1, "error", 137)
    assert str(failure) == (
        "rank 1 was killed by SIGKILL (by hand, or by the kernel when memory ran out)\n[rank 1] the last words"
    )
    assert rank_log_path(tmp_path, 1).read_text() == "the last words\n"


@pytest.mark.distributed
def test_a_rank_that_hangs_shows_where(tmp_path: Path) -> None:
    failure = first(faults.hangs_and_others_notice, tmp_path, stopped=False)
    assert (failure.rank, failure.cause, failure.code) == (1, "hang", 1)
    assert failure.what == "hangs: erniekit.distributed.rank.RankTimeoutError: rank 1 has sent nothing for 0.3 s"
    assert "in _waits_for_ever" in failure.text


@pytest.mark.distributed
def test_a_rank_that_hangs_before_all_have_met_is_named(tmp_path: Path) -> None:
    failure = first(faults.hangs_before_the_store, tmp_path, limit=25)
    assert (failure.rank, failure.cause, failure.code) == (1, "hang", 1)
    assert failure.what == "hangs: rank 0 waited in vain for the others to start"
    assert "in _waits_for_ever" in failure.text
    assert "in join_store" in rank_log_path(tmp_path, 0).read_text()


@pytest.mark.distributed
def test_a_stopped_rank_is_named_with_what_another_saw(tmp_path: Path) -> None:
    failure = first(faults.hangs_and_others_notice, tmp_path, stopped=True)
    assert failure.rank == 1 and failure.what.startswith("hangs and does not answer: ")


@pytest.mark.distributed
def test_where_each_waits_for_the_others_the_first_is_shown(tmp_path: Path) -> None:
    failure = first(faults.waits_for_all_others, tmp_path)
    assert failure.cause == "silent" and "RankTimeoutError" in failure.text


@pytest.mark.distributed
def test_a_rank_that_was_stopped_alone_is_the_cause(tmp_path: Path) -> None:
    failure = first(faults.is_stopped_alone, tmp_path)
    assert str(failure) == "rank 1 was stopped by SIGTERM"


@pytest.mark.distributed
def test_a_rank_that_leaves_early_is_named(tmp_path: Path) -> None:
    failure = first(faults.leaves, tmp_path)
    assert (failure.rank, failure.what, failure.code) == (1, "ended before the others", 1)
    assert "RankLostError: rank 1 has ended" in failure.text


@pytest.mark.distributed
def test_what_the_user_can_mend_is_shown_without_a_traceback(tmp_path: Path) -> None:
    failure = first(faults.refuses, tmp_path, 3)
    assert (failure.rank, str(failure)) == (1, "max_seq_len: too long")


@pytest.mark.distributed
def test_a_consequence_is_known_where_paddle_has_wrapped_it(tmp_path: Path) -> None:
    assert first(faults.wraps_what_it_noticed, tmp_path).rank == 1


@pytest.mark.distributed
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """A stopped rank, too: it could not end itself."""
    program = (
        "import sys, time; from pathlib import Path; from tests.distributed.ranks import start_ranks\n"
        "from tests.distributed.cases import faults\n"
        f"start_ranks(faults.sleeps, 2, Path({str(tmp_path)!r}), pids={str(tmp_path)!r}); time.sleep(60)"
    )
    real_ranks = os.environ | {"ERNIEKIT_COLD_RANKS": "1"}  # children of the launcher, and not of a server of forks
    launcher = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=real_ranks)
    files = [tmp_path / "0", tmp_path / "1"]
    ends = time.monotonic() + 20
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < ends and launcher.poll() is None
        time.sleep(0.05)
    pids = [int(file.read_text()) for file in files]
    os.kill(pids[1], signal.SIGSTOP)
    launcher.kill()
    launcher.wait()
    for pid in pids:
        wait_for_the_end(pid)

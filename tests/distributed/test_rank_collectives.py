"""The harness itself: what it returns, and what it shows and leaves when ranks fail."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.distributed.cases import faults
from tests.distributed.processes import wait_for_the_end
from tests.distributed.ranks import RanksFailedError, run_ranks

pytestmark = pytest.mark.distributed


def test_each_rank_returns_what_its_case_returned() -> None:
    assert run_ranks(faults.returns, 2, word="hello") == [
        {"rank": 0, "word": "hello", "size": 2},
        {"rank": 1, "word": "hello", "size": 2},
    ]


@pytest.mark.parametrize("case", [faults.raises_and_others_notice, faults.raises_and_others_go_on])
def test_the_first_real_traceback_is_shown_with_its_rank(case) -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailedError) as raised:
        run_ranks(case, 3, timeout=30)
    text = str(raised.value)
    assert text.startswith("rank 1 failed\n")
    assert "[rank 1] ValueError: the seventh sample is bad" in text and "faults.py" in text
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("case", "what"), [(faults.exits, "ended with exit code 3"), (faults.is_killed, "was killed by SIGKILL")]
)
def test_a_rank_that_exits_or_is_killed_ends_the_job(case, what: str) -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailedError, match=f"rank 1 {what}"):
        run_ranks(case, 2, timeout=30)
    assert time.monotonic() - started < 10


def test_a_job_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError) as raised:
        run_ranks(faults.hangs, 2, timeout=8, pids=str(tmp_path))
    assert "in hangs" in str(raised.value)  # where it hung
    for file in tmp_path.iterdir():
        for pid in file.read_text(encoding="utf-8").split():
            wait_for_the_end(pid)

"""Waiting for the ranks of a job: until all have ended well, or one has failed; then which failure was the cause.

No Paddle. A failure is told from its consequences by what the ranks report: a rank that lost another, or waited for it
in vain, raises an exception of its own and often ends before the rank that caused it.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from erniekit.distributed.rank import FailureKind, RankTimeoutError
from erniekit.environment import STOP_SIGNALS, answer_stop_signals
from erniekit.launch.local import RankExit, RankProcesses, rank_log_path

POLL_INTERVAL = 0.05  # seconds
GRACE_PERIOD = 2.0  # seconds for the other ranks to notice a failure and say what they saw
MAX_LINES = 60  # lines of what a rank said
# In the stacks of a rank: it waits for another one, only not yet too long. (A rank that a GPU's kernels wait for is not
# told from one that waits.)
WAITING_FOR_PEER = re.compile(r'mailboxes\.py", line \d+ in receive|init\.py", line \d+ in join_store')
TIMED_OUT_AT_STORE = re.compile(r"^Timeout \([^)]*\)!$.* in join_store$", re.MULTILINE | re.DOTALL)
STOP_CODES = {code for number in STOP_SIGNALS for code in (-number, 128 + number)}

Cause = Literal["user error", "error", "hang", "stopped", "left", "lost", "silent"]
DESCRIPTIONS: dict[FailureKind, str] = {
    "user error": "refused",
    "error": "failed",
    "lost": "lost another rank",
    "silent": "waited for another rank in vain",
}
# The first that occurs is the cause: a rank that was stopped alone, or that left, explains those that lost it, and one
# that hangs explains those that waited in vain.
CAUSE_PRIORITY: tuple[tuple[Cause, ...], ...] = (
    ("user error", "error"), ("hang",), ("stopped",), ("left",), ("silent",), ("lost",),
)  # fmt: skip


@dataclass(frozen=True)
class Failure:
    """Why a job failed.

    Attributes:
        rank: where it failed first.
        what: what that rank did, such as "was killed by SIGKILL".
        text: what it said of it: a message, a traceback, its stacks, or the end of its output.
        code: the exit code for the whole job, never 0.
    """

    rank: int
    cause: Cause
    what: str
    text: str
    code: int

    def __str__(self) -> str:
        if self.cause == "user error":
            return self.text
        said = "".join(f"\n[rank {self.rank}] {line}" for line in self.text.splitlines()[-MAX_LINES:])
        return f"rank {self.rank} {self.what}{said}"


def watch(
    ranks: RankProcesses,
    *,
    keep_waiting: Callable[[], bool] = lambda: True,
) -> list[Failure]:
    """Wait until all ranks of this machine have ended, or, after a failure, until the others could say what they saw.

    The caller ends the ranks that are left.

    Args:
        keep_waiting: asked several times a second; where it says no, waiting ends.

    Returns:
        What failed here, rank by rank, in the order in which it was seen. Nothing where all ranks ended well, and where
        `keep_waiting` said no before any failed.
    """

    def failed() -> bool:
        return any(rank.code and rank.code not in STOP_CODES for rank in ranks.ended.values())

    while keep_waiting():
        ranks.poll()
        if failed() or not ranks.running:
            break
        time.sleep(POLL_INTERVAL)
    if not failed():
        return []
    deadline = time.monotonic() + GRACE_PERIOD
    while ranks.running and time.monotonic() < deadline and keep_waiting():
        time.sleep(POLL_INTERVAL)
        ranks.poll()
    failures = [_failure(ended, rank_log_path(ranks.logs, ended.rank)) for ended in ranks.ended.values() if ended.code]
    noticed = list(failures)
    if ranks.running and all(failure.cause in ("silent", "lost") for failure in noticed):
        failures += hang_failures(ranks.stacks(ranks.running), noticed)
    if all(failure.cause == "lost" for failure in noticed):
        left = [ended.rank for ended in ranks.ended.values() if ended.code == 0]
        failures += [
            Failure(rank, "left", "ended before the others", noticed[0].text, noticed[0].code) for rank in left
        ]
    return failures


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that the others follow from."""
    return next(failure for causes in CAUSE_PRIORITY for failure in failures if failure.cause in causes)


def hang_failures(stacks: Mapping[int, str], noticed: Sequence[Failure]) -> list[Failure]:
    """Failures of the ranks that others waited for in vain and that are still there.

    Args:
        stacks: of every rank that is still there, where its threads are; "" for one that did not answer.
        noticed: the failures of the others.
    """
    timed_out = next((failure for failure in noticed if failure.cause == "silent"), None)
    if timed_out is None:
        return []
    said = [line for line in timed_out.text.splitlines() if RankTimeoutError.__name__ in line]
    seen = (
        said[-1].strip() if said else f"rank {timed_out.rank} {timed_out.what}"
    )  # Paddle wraps what is raised in a backward pass in many lines
    waiting = {rank for rank, text in stacks.items() if WAITING_FOR_PEER.search(text)}
    return [
        Failure(rank, "hang", f"hangs{'' if text else ' and does not answer'}: {seen}", text, timed_out.code)
        for rank, text in stacks.items()
        if rank not in waiting
    ]


def _failure(ended: RankExit, log: Path) -> Failure:
    report, code = ended.report, ended.code if ended.code > 0 else 128 - ended.code
    if report is not None:
        return Failure(ended.rank, report.kind, DESCRIPTIONS[report.kind], report.text, code)
    if ended.code in STOP_CODES:
        number = signal.Signals(code - 128)
        return Failure(ended.rank, "stopped", f"was stopped by {number.name}", "", code)
    text = _last_lines(log)
    if TIMED_OUT_AT_STORE.search(text):
        return Failure(ended.rank, "silent", "waited in vain for the others to start", text, code)
    what = f"was killed by {_name(-ended.code)}" if ended.code < 0 else f"ended with exit code {ended.code}"
    return Failure(ended.rank, "error", what, text, code)


def _name(number: int) -> str:
    if number == signal.SIGKILL:
        return "SIGKILL (by hand, or by the kernel when memory ran out)"
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _last_lines(path: Path, size: int = 1 << 16) -> str:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return "\n".join(file.read().decode("utf-8", errors="replace").splitlines()[-MAX_LINES:])


# Signals that ask for an end, on their way from a launcher to its ranks. No Paddle.

SHUTDOWN_TIMEOUT = 5.0  # seconds for ranks to end when they were told to end at once


@contextmanager
def received_signals() -> Iterator[list[int]]:
    """The signals that ask for an end and arrive while the body runs, oldest first; in another than the main thread
    none. Shell and kernel both send a SIGHUP when a terminal is closed, so only one that comes first counts."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGHUP or not received:
            received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    earlier = answer_stop_signals(note)
    try:
        yield received
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def signal_forwarder(received: list[int], ranks: RankProcesses) -> Callable[[], bool]:
    """What `watch` asks: whether to go on waiting, after signals that have arrived were passed on to the ranks.

    Ranks stop with a checkpoint after the first signal and at once after the second. Waiting ends with a third, or when
    the second has not ended them.
    """
    forwarded = 0
    deadline = float("inf")

    def keep_waiting() -> bool:
        nonlocal forwarded, deadline
        while forwarded < len(received):
            ranks.send_signal(received[forwarded])
            forwarded += 1
            if forwarded == 2:
                deadline = time.monotonic() + SHUTDOWN_TIMEOUT
        return forwarded < 3 and time.monotonic() < deadline

    return keep_waiting

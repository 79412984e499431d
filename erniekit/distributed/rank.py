"""What a rank owes the launcher that started it: it ends with it, says why it failed, and shows where it hangs.

No Paddle. A rank that something else started, such as paddle.distributed.launch, owes nothing.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from erniekit.errors import UserError

LAUNCHER, REPORT = (
    "ERNIEKIT_LAUNCHER",
    "ERNIEKIT_RANK_REPORT",
)  # variables: its process id, and a file for `FailureReport`
DUMP_STACKS_SIGNAL = signal.SIGUSR1
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h

FailureKind = Literal["user error", "error", "lost", "silent"]


class RankLostError(RuntimeError):
    """Another rank has ended, so what is waited for will not come: a consequence, not the cause, of a failure."""


class RankTimeoutError(RuntimeError):
    """Another rank has sent nothing for the whole time allowed: it hangs, or is too slow."""


# by name, because Paddle may wrap what is raised in a backward pass
SECONDARY_FAILURES: dict[str, FailureKind] = {RankLostError.__name__: "lost", RankTimeoutError.__name__: "silent"}


def is_rank() -> bool:
    """Whether this process is one of the ranks of a job, whoever has started it."""
    return "PADDLE_TRAINER_ID" in os.environ


@dataclass(frozen=True)
class FailureReport:
    """What ended a rank, in its own words.

    Attributes:
        kind: "user error": what the user can mend; "lost" and "silent": this rank has only noticed another's failure.
        text: the message of a user error, the traceback of any other.
    """

    kind: FailureKind
    text: str

    @classmethod
    def of(cls, error: BaseException) -> FailureReport:
        """The report of an exception."""
        if isinstance(error, UserError):
            return cls("user error", str(error))
        lines = traceback.format_exception(error)
        last = lines[-1]  # the exception itself; those that it came from stand above
        kind: FailureKind = next((kind for name, kind in SECONDARY_FAILURES.items() if name in last), "error")
        return cls(kind, "".join(lines).rstrip("\n"))

    @classmethod
    def read(cls, path: Path) -> FailureReport | None:
        """The report that a rank has left; None where it was given no time to."""
        try:
            report = cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return report if report.kind in get_args(FailureKind) else None

    def write(self, path: Path) -> None:
        temporary = path.with_suffix(".writing")
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        temporary.rename(path)


@dataclass(frozen=True)
class Launcher:
    """The process that started this rank, as the rank sees it."""

    report: Path

    def report_error(self, error: BaseException) -> None:
        """Leave what ended this rank; the launcher shows what was first, once for all ranks."""
        FailureReport.of(error).write(self.report)


def attach() -> Launcher | None:
    """Bind this process to its launcher, if one of ours has started it; the first thing that a rank does.

    From now on the kernel ends the process when the launcher is gone, however it went (on Linux), and the signal
    `DUMP_STACKS_SIGNAL` has it write where its threads are to the file beside the report.
    """
    launcher, report = os.environ.pop(LAUNCHER, None), os.environ.pop(REPORT, None)  # not for children of this process
    if launcher is None or report is None:
        return None
    if sys.platform == "linux":
        import ctypes  # costs every command a millisecond and a half

        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):  # it was gone before the kernel was told
        os._exit(128 + signal.SIGKILL)
    stacks = stacks_path(Path(report)).open("w", encoding="utf-8")
    faulthandler.register(DUMP_STACKS_SIGNAL, file=stacks, all_threads=True)
    return Launcher(Path(report))


def stacks_path(report: Path) -> Path:
    """Where a rank writes its stacks."""
    return report.with_suffix(".stacks")

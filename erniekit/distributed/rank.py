"""A rank's side of its launcher: end with the launcher, report errors, and dump stacks on request. Needs no Paddle.

All of this is inactive in a rank that another program started, such as paddle.distributed.launch.
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
)  # environment variables: the launcher's process id, and the path of the `FailureReport`
DUMP_STACKS_SIGNAL = signal.SIGUSR1
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h

FailureKind = Literal["user error", "error", "lost", "silent"]


class RankLostError(RuntimeError):
    """Another rank has ended, so its message will not arrive: a consequence of a failure, not its cause."""


class RankTimeoutError(RuntimeError):
    """Another rank has sent nothing within the timeout: it hangs, or is too slow."""


# By name, because Paddle may wrap exceptions of a backward pass.
SECONDARY_FAILURES: dict[str, FailureKind] = {RankLostError.__name__: "lost", RankTimeoutError.__name__: "silent"}


def is_rank() -> bool:
    """Return whether this process is a rank of a job, whoever started it."""
    return "PADDLE_TRAINER_ID" in os.environ


@dataclass(frozen=True)
class FailureReport:
    """The error that ended a rank.

    Attributes:
        kind: "user error": the user can fix it; "lost" and "silent": this rank only noticed another's failure.
        text: the message of a user error, the traceback of any other.
    """

    kind: FailureKind
    text: str

    @classmethod
    def of(cls, error: BaseException) -> FailureReport:
        """Build the report of an exception."""
        if isinstance(error, UserError):
            return cls("user error", str(error))
        lines = traceback.format_exception(error)
        own = error
        while isinstance(own, SystemError) and own.__cause__ is not None:  # of a C function that lost an exception
            own = own.__cause__
        last = traceback.format_exception_only(own)[-1]
        kind: FailureKind = next((kind for name, kind in SECONDARY_FAILURES.items() if name in last), "error")
        return cls(kind, "".join(lines).rstrip("\n"))

    @classmethod
    def read(cls, path: Path) -> FailureReport | None:
        """Read the report of a rank; None if it was killed before it could write one."""
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
    """The process that started this rank."""

    report: Path

    def report_error(self, error: BaseException) -> None:
        """Write the error that ended this rank; the launcher shows the first one, once for all ranks."""
        FailureReport.of(error).write(self.report)


def attach() -> Launcher | None:
    """Bind this process to its launcher, if `erniekit` launched it. A rank calls this first.

    From now on the kernel ends the process when the launcher has ended in any way (on Linux), and on the signal
    `DUMP_STACKS_SIGNAL` the process writes its threads' stacks to a file next to the report.
    """
    launcher, report = os.environ.pop(LAUNCHER, None), os.environ.pop(REPORT, None)  # not for children of this process
    if launcher is None or report is None:
        return None
    end_with_parent(int(launcher))
    stacks = stacks_path(Path(report)).open("w", encoding="utf-8")
    faulthandler.register(DUMP_STACKS_SIGNAL, file=stacks, all_threads=True)
    return Launcher(Path(report))


def end_with_parent(parent: int) -> None:
    """Let the kernel end this process when its parent, of that id, has ended in any way (on Linux)."""
    if sys.platform == "linux":
        import ctypes  # costs every command a millisecond and a half

        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it had ended before prctl
        os._exit(128 + signal.SIGKILL)


def stacks_path(report: Path) -> Path:
    """Return the path to which a rank writes its stacks."""
    return report.with_suffix(".stacks")

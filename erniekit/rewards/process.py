"""Run a reward in a process of its own, under limits of time and memory: the parent's end.

A function of a user may run for ever, take all memory, print, exit or crash, and so may a pattern or a schema on an
unlucky answer. The process is a new interpreter, not a fork, since Paddle's threads do not survive a fork. It gets
lines of JSON and answers with lines of JSON; `erniekit.rewards.child` is its other end.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from erniekit.terminal import escape_control_characters

logger = logging.getLogger(__name__)

START_SECONDS = 60.0  # that opening a reward may take at least, whatever its limit: imports take a while
MOST_LINES = 20  # that a reward prints in one call and that are shown
LONGEST_LINE = 2000  # bytes; the rest of what it prints is another line
_PACKAGES = Path(__file__).parents[2]  # where `erniekit` is imported from
# without the current folder, whose files may have names of the standard library's
_PROGRAM = (
    "import sys; sys.path[:] = [path for path in sys.path if path] + {paths!r}; "
    "from erniekit.rewards.child import serve; serve()"
)


class FailedError(Exception):
    """A call has failed; the text says how, as the predicate of "the reward".

    Attributes:
        advice: what the user can do.
        done: the number of answers that were scored before; -1 where the reward could not be opened.
    """

    def __init__(self, what: str, advice: str, done: int = 0) -> None:
        super().__init__(what)
        self.advice, self.done = advice, done


@dataclass(frozen=True)
class Limits:
    """What a reward may take.

    Attributes:
        seconds: for each call of it, and for opening it if that is more than START_SECONDS.
        memory_bytes: of data, as RLIMIT_DATA counts it: all that it may write to.
    """

    seconds: float
    memory_bytes: int


@dataclass(frozen=True)
class Wants:
    """What a function wants to be given.

    Attributes:
        many: whether it scores all answers at once.
        names: of its parameters.
        needed: those without a default.
        others: whether it takes all others, too.
    """

    many: bool
    names: tuple[str, ...]
    needed: tuple[str, ...]
    others: bool


# what is wrong where a program fails, by its key
_MEND = {"python": "mend the function", "json_schema": "mend the schema", "regex": "mend the pattern"}


class RewardProcess:
    """A process that computes one reward.

    Args:
        name: of the reward, before what it prints.
        program: what it computes, see `child.open_function`.

    Attributes:
        wants: what its function wants.

    Raises:
        FailedError: it cannot be opened.
    """

    def __init__(self, name: str, program: Mapping[str, Any], limits: Limits) -> None:
        self._name, self._limits = name, limits
        self._program = {**program, "memory_bytes": limits.memory_bytes, "paths": ["", *sys.path]}
        self._process: subprocess.Popen[bytes] | None = None
        self.wants = self._open()

    def call(self, request: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
        """Return the results of a call, `count` of them; see `child.as_numbers` and `child.as_number`.

        Args:
            request: `all`: the arguments of one call for all answers; or `each`: those of a call for each.

        Raises:
            FailedError: the call has failed.
        """
        if self._process is None:
            self._open()
        return self._exchange(request, count, self._limits.seconds)

    def close(self) -> None:
        """End the process and those that it has started."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _open(self) -> Wants:
        self._process = process = _start(site="python" in self._program)
        self._printed = _Printed(self._name, process)
        try:
            (reply,) = self._exchange(self._program, 1, max(START_SECONDS, self._limits.seconds), "wants")
        except FailedError as error:
            self.close()
            raise FailedError(str(error), error.advice, done=-1) from None
        return Wants(reply["many"], tuple(reply["names"]), tuple(reply["needed"]), reply["others"])

    def _exchange(
        self, request: Mapping[str, Any], count: int, seconds: float, answer: str = "result"
    ) -> list[dict[str, Any]]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        lock, state = threading.Lock(), {"late": False, "answered": False}

        def end_it() -> None:
            with lock:
                if not state["answered"]:
                    state["late"] = True
                    _kill(process)

        self._printed.begin()
        watch = threading.Timer(seconds, end_it)
        watch.daemon = True
        replies: list[dict[str, Any]] = []
        complete = False
        watch.start()
        try:
            with suppress(BrokenPipeError):  # it has ended before it read the request; its end of output says how
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            while len(replies) < count:
                line = process.stdout.readline()
                if not line.endswith(b"\n"):
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=1.0)  # it ends by itself, and says how
                    break
                reply = _read_reply(line)
                if reply is None:
                    what = "writes where its results go"
                    raise FailedError(what, "print, or open files; write to no other file descriptor", len(replies))
                if answer not in reply:
                    with lock:
                        state["answered"] = complete = not state["late"]
                    raise self._failure(reply, len(replies))
                replies.append(reply[answer])
            with lock:
                state["answered"] = complete = len(replies) == count and not state["late"]
        finally:
            watch.cancel()
            if not complete:  # also on an exception such as KeyboardInterrupt: the rest of an answer is in the pipe
                self.close()
                self._printed.wait()
        if complete:
            return replies
        if state["late"]:
            what = f"has not answered within {seconds:g} s"
            raise FailedError(what, "look for what does not end in it, or raise reward_time_limit", len(replies))
        raise FailedError(self._end_of(process.returncode), self._last_words(), len(replies))

    @property
    def _mend(self) -> str:
        """What to do about a program that fails."""
        return next(what for kind, what in _MEND.items() if kind in self._program)

    def _failure(self, reply: Mapping[str, Any], done: int) -> FailedError:
        if "memory" in reply:
            what = f"needs more than {self._limits.memory_bytes / 2**30:.3g} GiB of memory"
            return FailedError(what, "raise reward_memory_limit if it has to", done)
        return FailedError(reply["failed"], self._mend, done)

    def _end_of(self, code: int) -> str:
        if code >= 0:
            return f"has ended its process, with exit code {code}"
        by = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        why = ": the system may have run out of memory" if code == -signal.SIGKILL else ""
        return f"has crashed: its process was ended by {by}{why}"

    def _last_words(self) -> str:
        said = self._printed.last()
        return self._mend + (f"; the last it printed: {said}" if said else "")


class _Printed:
    """What a reward prints: shown in the log, at most `MOST_LINES` of a call; the last lines are kept for errors."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self._name, self._process, self._shown = name, process, 0
        self._kept: deque[str] = deque(maxlen=3)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Begin a call."""
        self._shown = 0

    def wait(self) -> None:
        """Wait until all of an ended process is read; a process that it has left behind may hold the pipe open."""
        self._thread.join(timeout=1.0)

    def last(self) -> str:
        """Return the last lines, joined."""
        return " | ".join(self._kept)

    def _read(self) -> None:
        stream = self._process.stderr
        assert stream is not None
        with stream:
            while data := stream.readline(LONGEST_LINE):
                line = escape_control_characters(data.decode("utf-8", "backslashreplace").rstrip("\n"))
                self._kept.append(line)
                self._shown += 1
                if self._shown <= MOST_LINES:
                    logger.info(f"reward {self._name} prints: {line}")
                elif self._shown == MOST_LINES + 1:
                    logger.info(f"reward {self._name} prints more, which is not shown")


def _read_reply(line: bytes) -> dict[str, Any] | None:
    """Return the object of JSON that a line is; None for anything else."""
    try:
        reply = json.loads(line)
    except ValueError:
        return None
    return reply if isinstance(reply, dict) else None


def _start(*, site: bool) -> subprocess.Popen[bytes]:
    """Start the child's interpreter; without `site`, which users' modules may need, it starts faster."""
    return subprocess.Popen(
        [
            sys.executable,
            *([] if site else ["-I", "-S"]),
            "-c",
            _PROGRAM.format(paths=[str(_PACKAGES), *filter(None, sys.path)]),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # signals to this program's group are not its; the end of its input ends it
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # its session, with what the reward has started


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    _kill(process)
    with suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
    process.wait()

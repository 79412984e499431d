"""Commands of the user to a running training, and stop signals: lines on its terminal or in `output_dir/control`.

    save              save a checkpoint now
    quit              save a checkpoint and stop
    eval              evaluate now
    export            write the model as it is now into `output_dir/export-STEP`
    status            report the run's progress
    time              say how long a step takes and when the run ends; `time to 3000`: when that step is made
    lr 1e-4           use this learning rate from the next step on, whatever the schedule says
    lr schedule       go back to the schedule
    loss_scale 1024   use this loss scale from the next step on (float16); overflows and growth change it as before
    save@3000         do this once 3,000 steps are made; so with each command above
    events            list what is still to come; `events clear` forgets it

The file is read and removed between two steps. A process that still has it open may continue to write until there is a
new file; a line without an end waits for its rest until the next look. The first rank reads; all ranks obey at the same
step. What is to come at a later step is part of checkpoints, so a resumed run does it, too.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple

from erniekit.environment import answer_stop_signals

WORDS = ("save", "quit", "eval", "export", "status", "time", "events", "events clear")  # commands without a number
NUMBERS = {
    "lr": "a learning rate, such as `lr 1e-4`, or `lr schedule`",
    "loss_scale": "a number, such as `loss_scale 1024`",
}
COMMANDS = "save, quit, eval, export, status, time, lr X, loss_scale X, events, events clear and COMMAND@STEP"
CONTROL_FILE = "control"
_MAX_BYTES = 4096  # bytes of a file that are read at once; longer input is not meant for us


class Command(NamedTuple):
    """What a line asks for.

    Attributes:
        name: one of `WORDS` or of `NUMBERS`.
        value: of `lr` the learning rate, None for the schedule's; of `loss_scale` the scale; of `time` a step.
        step: the number of finished steps at which it happens; None: now.
    """

    name: str
    value: float | None = None
    step: int | None = None

    def __str__(self) -> str:
        """The line that asks for it."""
        value = "" if self.value is None else f" {self.value:.15g}"
        words = {"lr": f"lr{value or ' schedule'}", "time": f"time to{value}" if value else "time"}
        line = words.get(self.name, f"{self.name}{value}")
        return line if self.step is None else f"{line}@{self.step}"


def parse(line: str) -> Command:
    """Parse a line; upper and lower case are the same.

    Raises:
        ValueError: the line is not a command; the message lists the commands.
    """
    what, at, when = line.casefold().rpartition("@")
    if not at:
        return _parse_command(line, line)
    command = _parse_command(what, line)
    if command.name.startswith("events"):
        raise ValueError(f"{_shown(line)}: `{command}` is answered at once, so it takes no step")
    try:
        return command._replace(step=_step(when))
    except ValueError:
        raise ValueError(f"{_shown(line)}: write the step as a number, such as `{command}@3000`") from None


def _parse_command(text: str, line: str) -> Command:
    """Parse the part of a line before `@STEP`."""
    name, *rest = text.casefold().split() or [""]
    if name == "lr" and rest == ["schedule"]:
        return Command("lr")
    if name in NUMBERS and len(rest) == 1:
        try:
            value = float(rest[0])
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} {rest[0][:80]}: write {NUMBERS[name]}")
        return Command(name, value)
    if name == "time" and len(rest) == 2 and rest[0] == "to":
        try:
            return Command("time", _step(rest[1]))
        except ValueError:
            raise ValueError(f"{_shown(line)}: write the step as a number, such as `time to 3000`") from None
    words = " ".join([name, *rest])
    if words in WORDS:
        return Command(words)
    raise ValueError(f"{_shown(line)!r} is not a command; the commands are {COMMANDS}")


def _step(text: str) -> int:
    """Return the number of a step; it has at most 15 digits, so that JSON and `float` hold it exactly."""
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 15):
        raise ValueError(text)
    return int(digits)


def _shown(line: str) -> str:
    return line.strip() if len(line) <= 50 else f"{line.strip()[:50]} ..."


class Commands:
    """Lines for a run, in the order of their arrival.

    Args:
        folder: the output folder; None: read no file.
        terminal: a file descriptor from which typed lines are read; None: read no terminal.
    """

    def __init__(self, folder: Path | None, terminal: int | None = None) -> None:
        self._file = None if folder is None else folder / CONTROL_FILE
        self._taken: IO[bytes] | None = None  # the last file, which its writer may still have open
        self._partial = b""  # the last line, without its end
        self._terminal, self._typed = terminal, b""

    @classmethod
    def for_run(cls, folder: Path) -> Commands:
        """Return the commands for a run in this folder, also from its terminal if it has one.

        Commands that were written to the file before the run began are discarded.
        """
        commands = cls(folder, _own_terminal())
        commands._take()
        commands._close()
        return commands

    @classmethod
    def typed(cls) -> Commands:
        """Return the commands typed at the terminal of this process, if it has one."""
        return cls(None, _own_terminal())

    def lines(self) -> list[str]:
        """Return the lines since the last call; never wait."""
        return [line for line in (*self._typed_lines(), *self._written()) if line.strip()]

    def _written(self) -> list[str]:
        """Return the complete lines added to the last file, and those of a new one.

        A line without an end is returned once nothing has been added since the last look.
        """
        added = self._read()
        *lines, rest = (self._partial + added).split(b"\n")
        if taken := self._take():
            lines.append(rest)
            *complete, rest = taken.split(b"\n")
            lines += complete
        elif not added:
            lines, rest = [*lines, rest], b""
        self._partial = rest
        return [line.decode("utf-8-sig", errors="replace") for line in lines]

    def _take(self) -> bytes:
        """Return the content of a new file, after removing it from the folder."""
        if self._file is None:
            return b""
        taken = self._file.with_name(f"{CONTROL_FILE}.taken")
        try:
            if not self._file.stat().st_size:
                return b""  # created, but not written yet
            self._file.rename(taken)  # later writes to the folder create another file
            self._close()
            try:
                self._taken = taken.open("rb")
            finally:
                taken.unlink()
        except OSError:  # missing, or not readable
            return b""
        return self._read()

    def _read(self) -> bytes:
        """Return what was added to the taken file since it was read."""
        if self._taken is None:
            return b""
        size = os.fstat(self._taken.fileno()).st_size
        if size < self._taken.tell():
            self._taken.seek(0)  # its writer has truncated it
        more = size - self._taken.tell() - _MAX_BYTES
        read = self._taken.read(_MAX_BYTES)
        if more <= 0:
            return read
        self._taken.seek(size)
        return read[: read.rfind(b"\n") + 1] + f"(and {more:,} bytes that were not read)\n".encode()

    def _close(self) -> None:
        if self._taken is not None:
            self._taken.close()
        self._taken, self._partial = None, b""

    def _typed_lines(self) -> list[str]:
        while (
            self._terminal is not None
            and _in_foreground(self._terminal)
            and select.select([self._terminal], [], [], 0)[0]
        ):
            try:
                read = os.read(self._terminal, 4096)
            except OSError:  # the terminal hung up
                read = b""
            if not read:
                self._terminal = None  # closed
            self._typed += read
        *complete, self._typed = self._typed.split(b"\n")
        return [line.decode(errors="replace") for line in complete]


NO_COMMANDS = Commands(None)


def forward_commands(lines: list[str], folder: Path) -> str:
    """Append lines to the control file of a run whose ranks have no terminal.

    Returns:
        Why the run will not receive them; "" if it will.
    """
    said = ", ".join(line.strip() for line in lines)
    if lines and not folder.is_dir():
        return f"{said}: the run has not begun; type it again later"
    if lines:
        try:
            with (folder / CONTROL_FILE).open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
        except OSError as error:
            return f"{said}: {folder / CONTROL_FILE} cannot be written ({error.strerror})"
    return ""


def _own_terminal() -> int | None:
    return sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None


def _in_foreground(terminal: int) -> bool:
    """Return whether this process is in the foreground: the system stops a background process that reads."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # no terminal: a pipe can always be read
        return True


# Stop signals: Ctrl-C, SIGTERM, and SIGHUP of a terminal that was closed. The first asks for an orderly stop after the
# current step, the second stops at once, unless it is a SIGHUP: shell and kernel both send one for the same event.
# The handler only records the signal, because it may interrupt a print, and printing again from there is an error; the
# training loop reports it.


class ForcedStopError(SystemExit):
    """A second signal arrived; `code` is the exit code that a shell expects of a process ended by a signal."""


class StopRequest:
    """The signal that asked the run to stop, if any, and the second one, which stops it at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.second_signal: int | None = None

    def check(self) -> None:
        """Raise ForcedStopError if a second signal has arrived."""
        if self.second_signal is not None:
            raise ForcedStopError(128 + self.second_signal)


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Catch the signals that ask for an end while the body runs. Outside the main thread, which alone gets signals, do
    nothing.

    Raises:
        ForcedStopError: a second signal arrived. It replaces later errors of the body, which are consequences:
            Paddle turns an exception in a backward pass into an OSError, and other ranks may have ended.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if request.signal is None:
            request.signal = number
        elif number != signal.SIGHUP:
            request.second_signal = number
            request.check()

    earlier = answer_stop_signals(on_signal)
    try:
        yield request
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        request.check()

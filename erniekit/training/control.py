"""What a user tells a run while it trains: lines typed at its terminal, or written to `output_dir/control`.

    save          save a checkpoint now
    quit          save a checkpoint and stop
    eval          evaluate now
    status        say where the run stands
    lr 1e-4       use this learning rate from the next step on, whatever the schedule says
    lr schedule   go back to the schedule

The file is read and removed between two steps. Who still has it open may write on, until there is another one; a line
without an end waits for the rest of it until the next look. The first rank of a run reads; all ranks obey at the same
step.
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
from typing import IO, TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from erniekit.training.checkpoint.state import TrainerState


COMMANDS = ("save", "quit", "eval", "status", "lr")
CONTROL_FILE = "control"
_MAX_BYTES = 4096  # bytes of a file that are read at once; nobody has so much to say


class Command(NamedTuple):
    """A word of `COMMANDS`; of `lr` the learning rate, None for the schedule's."""

    name: str
    value: float | None = None


def parse(line: str) -> Command:
    """The command that a line holds; words may be written in capitals.

    Raises:
        ValueError: none, with what there is.
    """
    word, *rest = line.casefold().split() or [""]
    if word == "lr" and rest == ["schedule"]:
        return Command("lr")
    if word == "lr" and len(rest) == 1:
        try:
            value = float(rest[0])
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise ValueError(f"lr {rest[0][:80]}: write a learning rate, such as `lr 1e-4`, or `lr schedule`")
        return Command("lr", value)
    if word in COMMANDS and word != "lr" and not rest:
        return Command(word)
    shown = line.strip() if len(line) <= 80 else f"{line.strip()[:80]} ..."
    raise ValueError(f"{shown!r} is no command; there are save, quit, eval, status, lr 1e-4 and lr schedule")


class Commands:
    """Lines for a run, in the order in which they came.

    Args:
        folder: the output folder; None: nothing is read from there.
        terminal: a file descriptor to read typed lines from; None: nothing is read from there.
    """

    def __init__(self, folder: Path | None, terminal: int | None = None) -> None:
        self._file = None if folder is None else folder / CONTROL_FILE
        self._taken: IO[bytes] | None = None  # the last file, which its writer may still have open
        self._partial = b""  # of its last line
        self._terminal, self._typed = terminal, b""

    @classmethod
    def for_run(cls, folder: Path) -> Commands:
        """Those of a run in this folder, and at the terminal that it has, if any. What was written to the file before
        the run began is for another one, and is forgotten."""
        commands = cls(folder, _own_terminal())
        commands._take()
        commands._close()
        return commands

    @classmethod
    def typed(cls) -> Commands:
        """Those that are typed at the terminal of this process, if it has one."""
        return cls(None, _own_terminal())

    def lines(self) -> list[str]:
        """What has come since the last call; never waits."""
        return [line for line in (*self._typed_lines(), *self._written()) if line.strip()]

    def _written(self) -> list[str]:
        """What was added to the last file since it was read, and what a new one holds; of either its whole lines, and
        the rest of it where nothing has been added since the last look."""
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
        """What a new file holds, which no longer lies in the folder then."""
        if self._file is None:
            return b""
        taken = self._file.with_name(f"{CONTROL_FILE}.taken")
        try:
            if not self._file.stat().st_size:
                return b""  # made, and not yet written
            self._file.rename(taken)  # what is written to the folder from now on is another file
            self._close()
            try:
                self._taken = taken.open("rb")
            finally:
                taken.unlink()
        except OSError:  # not there, or not readable to us
            return b""
        return self._read()

    def _read(self) -> bytes:
        """What the file that was taken holds beyond what was read."""
        if self._taken is None:
            return b""
        size = os.fstat(self._taken.fileno()).st_size
        if size < self._taken.tell():
            self._taken.seek(0)  # its writer began anew
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
            except OSError:  # of a terminal that hung up
                read = b""
            if not read:
                self._terminal = None  # closed
            self._typed += read
        *complete, self._typed = self._typed.split(b"\n")
        return [line.decode(errors="replace") for line in complete]


NO_COMMANDS = Commands(None)


def forward_commands(lines: list[str], folder: Path) -> str:
    """Give lines to the run in this folder: what a process does whose ranks have no terminal.

    Returns:
        Why nobody will hear them; empty where somebody will.
    """
    said = ", ".join(line.strip() for line in lines)
    if lines and not folder.is_dir():
        return f"{said}: the run has not begun; type it again then"
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
    """Whether this process is in the foreground: the system stops one in the background that reads."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # no terminal: a pipe may always be read
        return True


def status_line(
    state: TrainerState, total_steps: int, learning_rate: float, saved_step: int, writing: bool = False
) -> str:
    """What `status` tells; `saved_step` is -1 where nothing is saved, and may still be being written."""
    totals = state.whole_run
    loss = f", mean loss {totals.loss:.4f}" if totals.units else ""
    saved = (
        f"step {saved_step:,} is {'being written' if writing else 'saved'}" if saved_step >= 0 else "nothing is saved"
    )
    return (
        f"status: {state.step:,} of {total_steps:,} steps, epoch {state.epoch:.2f}{loss}, learning rate "
        f"{learning_rate:g}, {totals.tokens_per_second:,.0f} tokens/s; {saved}"
    )


# Ctrl-C and SIGTERM: the first asks for an orderly stop after the current step, the second stops at once.
#
# The handler only notes the signal. It may interrupt a print, and printing again from there is an error; the loop
# tells.


class ForcedStopError(SystemExit):
    """A second signal arrived; `code` is what a shell expects of a program that it ended."""


class StopRequest:
    """Which signal, if any, asked the run to stop, and which one to stop at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.second_signal: int | None = None

    def check(self) -> None:
        """Raise StoppedAtOnceError once a second signal has arrived."""
        if self.second_signal is not None:
            raise ForcedStopError(128 + self.second_signal)


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Catch SIGINT and SIGTERM while the body runs. Outside the main thread, which has no signals, do nothing.

    Raises:
        ForcedStopError: a second signal arrived. Whatever else the body raises after that follows from it: Paddle
            makes an OSError of what is raised in a backward pass, and other ranks may be gone.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if request.signal is None:
            request.signal = number
        else:
            request.second_signal = number
            request.check()

    earlier = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        request.check()

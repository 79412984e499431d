"""The process that a verb runs in: its standard streams, and SIGTERM."""

from __future__ import annotations

import _thread
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

TERMINATED = 128 + signal.SIGTERM


class Terminated(SystemExit):
    """SIGTERM arrived. As a SystemExit it ends a forked child quietly, too."""


_RAISED_BY = {KeyboardInterrupt: signal.SIGINT, Terminated: signal.SIGTERM}


class Output(io.FileIO):
    """The bytes of a standard stream. What cannot be written is dropped; the first failure is remembered.

    Attributes:
        failure: the first error of the system, which tells it from every other OSError.
    """

    def __init__(self, descriptor: int, *, raises: bool) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.failure: OSError | None = None
        self._raises = raises

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            first, self.failure = self.failure is None, self.failure or error
            if first and self._raises:  # once: the last flush of the interpreter must not complain again
                raise
            return memoryview(data).nbytes


@contextmanager
def standard_streams(*, output_may_fail: bool) -> Iterator[Output | None]:
    """Make standard input, output and error safe to use: none is missing, none fails on a character.

    Args:
        output_may_fail: go on where standard output cannot be written; otherwise the first failure raises OSError.

    Yields:
        What is under standard output; None where it is no stream of the process, as in a test.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started us; also keeps its descriptor from being reused
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # what is not UTF-8 is refused where it is used
    stdout, stderr, output = sys.stdout, sys.stderr, None
    original_stdout, original_stderr = sys.__stdout__, sys.__stderr__
    if original_stdout is not None and stdout is original_stdout:
        output = Output(original_stdout.fileno(), raises=not output_may_fail)
        sys.stdout = _text(output, stdout)
    if original_stderr is not None and stderr is original_stderr:
        sys.stderr = _text(Output(original_stderr.fileno(), raises=False), stderr)
    try:
        yield output
    finally:
        if output is not None:
            sys.stdout.flush()
        sys.stdout, sys.stderr = stdout, stderr


def _text(output: Output, like: Any) -> io.TextIOWrapper:
    like.flush()
    return io.TextIOWrapper(
        output if like.write_through else io.BufferedWriter(output),  # PYTHONUNBUFFERED, as in the logs of ranks
        encoding=like.encoding,
        errors="backslashreplace",
        line_buffering=like.line_buffering,
        write_through=like.write_through,
    )


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Have SIGTERM raise Terminated, so that files are closed and locks released. A handler of others is kept.

    What SIGTERM or Ctrl-C raises inside a destructor, Python reports and drops; such a signal comes again.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(_number: int, _frame: FrameType | None) -> None:
        raise Terminated(TERMINATED)

    def repeat_signal(dropped: Any) -> None:
        number = _RAISED_BY.get(dropped.exc_type)
        if number is None:
            previous_hook(dropped)
        else:
            threading.Timer(0.02, _thread.interrupt_main, [number]).start()  # when the destructor is over

    previous_hook = sys.unraisablehook
    signal.signal(signal.SIGTERM, terminate)
    sys.unraisablehook = repeat_signal
    try:
        yield
    finally:
        sys.unraisablehook = previous_hook
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

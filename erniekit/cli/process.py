"""Set up the process that a verb runs in: standard streams that cannot fail, and SIGTERM and SIGHUP as exceptions."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_ENDING = (signal.SIGTERM, signal.SIGHUP)


class Terminated(SystemExit):
    """Raised by SIGTERM and SIGHUP; `code` is the exit code. As a SystemExit it also ends a forked child quietly."""


class Output(io.FileIO):
    """A standard stream of bytes that drops what it cannot write and remembers the first failure.

    Attributes:
        failure: the first OSError, by which the caller recognises it; None if every write succeeded.
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
            if first and self._raises:  # only once: the interpreter's last flush must not fail again
                raise
            return memoryview(data).nbytes


@contextmanager
def standard_streams(*, output_may_fail: bool) -> Iterator[Output | None]:
    """Make standard input, output and error safe to use: all exist, and no character fails to encode.

    Args:
        output_may_fail: continue if standard output cannot be written; otherwise the first failure raises OSError.

    Yields:
        The stream beneath standard output; None if a test or a caller has replaced `sys.stdout`.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the parent closed it; opening also keeps the descriptor from being reused
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # whoever uses the text rejects what is not UTF-8
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
        output if like.write_through else io.BufferedWriter(output),  # PYTHONUNBUFFERED, as for the logs of ranks
        encoding=like.encoding,
        errors="backslashreplace",
        line_buffering=like.line_buffering,
        write_through=like.write_through,
    )


@contextmanager
def raise_on_termination() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise Terminated, so that files are closed and locks released. Keep a handler that
    somebody else set, as `nohup` does.

    Python reports and drops an exception raised inside a destructor; such a signal is sent again.
    """
    unhandled = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread() or signal.SIGTERM not in unhandled:
        yield
        return

    def terminate(number: int, _frame: FrameType | None) -> None:
        raise Terminated(128 + number)

    def repeat_signal(dropped: Any) -> None:
        if dropped.exc_type is KeyboardInterrupt:
            number = int(signal.SIGINT)
        elif dropped.exc_type is Terminated:
            number = dropped.exc_value.code - 128
        else:
            previous_hook(dropped)
            return
        _send_until_heard(number)

    previous_hook = sys.unraisablehook
    for number in unhandled:
        signal.signal(number, terminate)
    sys.unraisablehook = repeat_signal
    try:
        yield
    finally:
        sys.unraisablehook = previous_hook
        for number in unhandled:
            signal.signal(number, signal.SIG_DFL)


def _send_until_heard(number: int) -> None:
    """Send a signal to the main thread, after the destructor that runs in it has returned, until its handler is called.

    A real signal also ends a system call that the thread waits in, but one that arrives just before the call does not.
    """
    main, handler, heard = threading.main_thread(), signal.getsignal(number), threading.Event()

    def hear(received: int, frame: FrameType | None) -> None:
        heard.set()
        signal.signal(received, handler)
        if callable(handler):
            handler(received, frame)

    def send() -> None:
        while main.is_alive() and not heard.wait(0.05) and main.ident is not None:
            signal.pthread_kill(main.ident, number)

    signal.signal(number, hear)
    threading.Thread(target=send, daemon=True).start()

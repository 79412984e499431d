"""Ctrl-C and SIGTERM: the first asks for an orderly stop after the current step, the second stops at once.

The handler only notes the signal. It may interrupt a print, and printing again from there is an error; the loop tells.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


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

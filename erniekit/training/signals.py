"""Ctrl-C and SIGTERM: the first asks for an orderly stop after the current step, the second stops at once.

The handler only notes the signal. It may interrupt a print, and printing again from there is an error; the loop tells.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Which signal, if any, asked the run to stop."""

    def __init__(self) -> None:
        self.signal: int | None = None


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Catch SIGINT and SIGTERM while the body runs. Outside the main thread, which has no signals, do nothing."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if request.signal is not None:
            raise SystemExit(128 + number)
        request.signal = number

    earlier = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)

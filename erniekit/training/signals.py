"""Ctrl-C and SIGTERM: the first asks for an orderly stop after the current step, the second stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Which signal, if any, asked the run to stop."""

    def __init__(self) -> None:
        self.signal: int | None = None


@contextmanager
def stop_signals(say: Callable[[str], None] = print) -> Iterator[StopRequest]:
    """Catch SIGINT and SIGTERM while the body runs. Outside the main thread, which has no signals, do nothing."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if request.signal is not None:
            raise SystemExit(128 + number)
        request.signal = number
        say(f"{signal.Signals(number).name}: stopping after this step; once more to stop at once")

    earlier = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)

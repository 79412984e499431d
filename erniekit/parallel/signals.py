"""SIGINT and SIGTERM on their way from a launcher to its ranks. No Paddle."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from erniekit.parallel.launch import RankProcesses

SHUTDOWN_TIMEOUT = 5.0  # seconds for ranks to end when they were told to end at once


@contextmanager
def received_signals() -> Iterator[list[int]]:
    """The SIGINTs and SIGTERMs that arrive while the body runs, oldest first; in another than the main thread none."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    earlier = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def signal_forwarder(received: list[int], ranks: RankProcesses) -> Callable[[], bool]:
    """What `watch` asks: whether to go on waiting, after signals that have arrived were passed on to the ranks.

    Ranks stop with a checkpoint after the first signal and at once after the second. Waiting ends with a third, or when
    the second has not ended them.
    """
    forwarded = 0
    deadline = float("inf")

    def keep_waiting() -> bool:
        nonlocal forwarded, deadline
        while forwarded < len(received):
            ranks.send_signal(received[forwarded])
            forwarded += 1
            if forwarded == 2:
                deadline = time.monotonic() + SHUTDOWN_TIMEOUT
        return forwarded < 3 and time.monotonic() < deadline

    return keep_waiting

"""Show how encoding goes on: a live line on a terminal, a line for each block elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

from erniekit.data.recording_facts import duration
from erniekit.terminal import escape_control_characters

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 0.5


class CodesProgress:
    """Counts recordings and seconds of sound, and tells the real-time factor: seconds of sound in a second.

    Args:
        recordings, blocks: that are to be done.
    """

    def __init__(self, recordings: int, blocks: int) -> None:
        self._recordings, self._blocks = recordings, blocks
        self._done, self._blocks_done, self._seconds = 0, 0, 0.0
        self._began = time.perf_counter()
        self._shown = 0.0
        self._live = sys.stderr is not None and sys.stderr.isatty()

    def __enter__(self) -> CodesProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear()

    def recording(self, seconds: float) -> None:
        """Count a recording of so many seconds; 0 for one that was not encoded."""
        self._done, self._seconds = self._done + 1, self._seconds + seconds
        now = time.perf_counter()
        if self._live and now - self._shown >= REFRESH_SECONDS:
            self._shown = now
            line = f"{self._done:,} of {self._recordings:,} recordings{self._speed()}"
            print(f"\r\x1b[K{escape_control_characters(line[:100])}", end="", file=sys.stderr, flush=True)

    def block(self, count: int, seconds: float) -> None:
        """Tell of a complete block."""
        self._blocks_done += 1
        if not self._live:
            block = f"block {self._blocks_done:,} of {self._blocks:,}: {count:,} recordings, {duration(seconds)}"
            logger.info(f"{block}{self._speed()}")

    def told(self) -> str:
        """Return the time that it took, and the real-time factor."""
        self._clear()
        took = time.perf_counter() - self._began
        return f" in {duration(took)}, {self._seconds / took:,.1f} x real time" if self._done else ""

    def _speed(self) -> str:
        took = time.perf_counter() - self._began
        left = took / self._done * (self._recordings - self._done) if self._done else 0.0
        return f"; {self._seconds / took:,.1f} x real time, {duration(left)} left"

    def _clear(self) -> None:
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

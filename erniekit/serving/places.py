"""How many answers may be under way or wait, and when a place will be free."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from erniekit.serving.errors import RefusedError

LONGEST_WAIT = 600  # seconds that a client is told to wait at most
WEIGHT = 0.2  # of the newest answer in the mean time that one takes


class Places:
    """The places of answers: `running` are computed side by side, `waiting` more are accepted."""

    def __init__(self, running: int, waiting: int) -> None:
        self._running, self._most = running, running + waiting
        self._taken = 0
        self._mean_seconds = 1.0

    @property
    def taken(self) -> int:
        """The number of answers under way and waiting."""
        return self._taken

    @contextmanager
    def take(self, count: int = 1) -> Iterator[None]:
        """Hold places for `count` answers inside the context.

        Raises:
            RefusedError: 429, with the seconds after which there should be room.
        """
        if count > self._most:
            raise RefusedError(f"a request may ask for {self._most:,} answers at most, and this one asks for {count:,}")
        if self._taken + count > self._most:
            wait = self._wait()
            raise RefusedError(
                f"{self._taken:,} answers are under way or waiting, which is all that this server accepts; "
                f"ask again in {wait} s",
                status=429,
                code="queue_full",
                retry_after=wait,
            )
        self._taken += count
        began = time.monotonic()
        try:
            yield
        finally:
            self._taken -= count
            self._mean_seconds += WEIGHT * (time.monotonic() - began - self._mean_seconds)

    def _wait(self) -> int:
        """Return after how many seconds the first of those that wait should have an answer."""
        rounds = max(1.0, (self._taken - self._running) / self._running)
        return min(LONGEST_WAIT, max(1, round(rounds * self._mean_seconds)))

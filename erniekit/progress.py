"""Show how far long work has come: a bar on a terminal, elsewhere one line a minute. Both with rate and time left.

    for record in progress(records, "tokenising train.jsonl", unit="records"):
        ...

No thread draws: whoever counts draws, at most twice a second. Work that takes less than a second shows nothing.
Work of a thread beside training has lines alone, because training draws a bar of its own.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Optional, TypeVar, Union

from erniekit.terminal import escape_control_characters

logger = logging.getLogger(__name__)
T = TypeVar("T")
Total = Union[float, Callable[[], Optional[float]], None]  # noqa: UP007, UP045 - evaluated by Python 3.10

SHOWN_AFTER = 1.0  # seconds of work before the bar appears
REDRAWN_EVERY = 0.5  # seconds
LINE_EVERY = 60.0  # seconds from one line to the next where there is no terminal

_shown: Progress | None = None  # the one that draws a bar; others inside it stay silent


class Progress:
    """Counts what is done; a context that removes the bar at its end, also after an error.

    Args:
        what: what is done, for people: "tokenising train.jsonl".
        total: how many there are, or what counts them when it is first shown; None: not known, and no time left is
            shown.
        unit: what is counted, in the plural.
    """

    def __init__(self, what: str, total: Total = None, unit: str = "records") -> None:
        self._what, self._total, self._unit = escape_control_characters(what), total, unit
        self.done, self.note = 0.0, ""
        self._began = time.monotonic()
        in_front = threading.current_thread() is threading.main_thread()
        self._live = in_front and sys.stderr is not None and sys.stderr.isatty()
        self._next = self._began + (SHOWN_AFTER if self._live else LINE_EVERY)
        self._bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def advance(self, count: float = 1, note: str = "") -> None:
        """Count so many more.

        Args:
            note: further words behind the rate, such as a real-time factor.
        """
        self.done += count
        self.note = note or self.note
        if time.monotonic() >= self._next:
            self._show()

    def parts(self, size: float, scale: float = 1.0) -> Callable[[float], None]:
        """Return what counts one item of `size` by how much of it is done so far, in 1 / `scale` of the unit.

        Whoever does it may begin anew, and may tell less than all of it; `advance` counts no item beside it.
        """
        before = 0.0

        def so_far(done: float) -> None:
            nonlocal before
            now = min(done, size) * scale
            self.advance(now - before)
            before = now

        return so_far

    def line(self) -> str:
        """Return how far it has come, in words."""
        took = max(1e-9, time.monotonic() - self._began)
        rate = self.done / took
        of, left, total = "", "", self.total()
        if total:
            of = f" of {total:,.0f} ({min(1.0, self.done / total):.0%})"
            left = f", {_time(max(0.0, total - self.done) / rate)} left" if rate else ""
        note = f", {self.note}" if self.note else ""
        return f"{self._what}: {self.done:,.0f}{of} {self._unit}, {_rate(rate)}/s{note}{left}"

    def total(self) -> float | None:
        """Return how many there are; None: not known."""
        if callable(self._total):
            self._total = self._total()
        return self._total

    def close(self) -> None:
        """Remove the bar."""
        global _shown
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if _shown is self:
            _shown = None

    def _show(self) -> None:
        self._next = time.monotonic() + (REDRAWN_EVERY if self._live else LINE_EVERY)
        if not self._live:
            logger.info(self.line())
        elif self._draws():
            what, _, figures = self.line().partition(": ")
            self._bar.update(
                0, completed=self.done, total=self.total(), description=what, figures=figures, refresh=True
            )

    def _draws(self) -> bool:
        """Whether the terminal is this one's; the first that takes longer has it."""
        global _shown
        if _shown is None:
            from rich.console import Console  # 70 ms, only where a bar is drawn
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"))
            self._bar = Bar(*columns, console=Console(stderr=True, markup=False), transient=True, auto_refresh=False)
            self._bar.add_task(self._what, total=self.total(), figures="")
            self._bar.start()
            _shown = self
        return _shown is self


def progress(items: Iterable[T], what: str, total: Total = None, unit: str = "records") -> Iterator[T]:
    """Yield `items`, and show how many have been done."""
    with Progress(what, total, unit) as shown:
        for item in items:
            yield item
            shown.advance()


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _time(seconds: float) -> str:
    """`h:mm:ss`, or `m:ss` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def lines_of(path: Path) -> float | None:
    """Return the number of lines of a JSONL file, read at gigabytes a second; None for others."""
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    with open(path, "rb") as file:
        return float(sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b"")))

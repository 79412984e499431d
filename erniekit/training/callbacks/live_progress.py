"""Progress on a terminal: a bar with the time left, and the latest figures under it. Logs and evaluations scroll past
above."""

from __future__ import annotations

import os
import signal
import sys
import termios
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from erniekit.terminal import escape_control_characters, wrap_lines
from erniekit.training.callbacks import Callback, Record, TrainingRun
from erniekit.training.callbacks.console import evaluation_lines, format_metrics, log_lines


class LiveProgress(Callback):
    """Redrawn a few times a second; lines printed meanwhile appear above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
            expand=True,
        )
        self._task = self._bar.add_task("training")
        self._total = 0
        self._metrics = Text("")
        self._live = Live(get_renderable=self._display, console=self._console, refresh_per_second=4)
        self._echo = Echo(sys.stdin)

    def on_train_begin(self, run: TrainingRun) -> None:
        self._total = run.total_steps
        self._bar.reset(self._task, total=run.total_steps, completed=run.first_step)
        self._echo.switch_off()
        self._live.start()

    def on_step(self, record: Record) -> None:
        self._bar.update(self._task, completed=record["step"])
        self._metrics = Text(format_metrics(record))

    def on_log(self, record: Record) -> None:
        self._print(log_lines(record, self._total))

    def on_evaluate(self, record: Record) -> None:
        self._print(evaluation_lines(record))

    def on_save(self, folder: Path) -> None:
        self._print(f"saved {folder}")

    def on_train_end(self, result: Any) -> None:
        self._live.stop()  # before the closing lines

    def close(self) -> None:
        self._live.stop()
        self._echo.restore()

    def _print(self, text: str) -> None:
        lines = wrap_lines(escape_control_characters(text), self._console.width)
        self._console.print(lines, highlight=False, markup=False)

    def _display(self) -> Group:
        return Group(self._bar, self._metrics)


class Echo:
    """The terminal's echo of typed characters. A command that is typed under the display would move it by a line, so
    that a copy of the bar stayed behind.

    Args:
        stream: standard input; one that is no terminal is left alone.
    """

    def __init__(self, stream: Any) -> None:
        self._terminal: int | None = stream.fileno() if stream is not None and stream.isatty() else None
        self._before: list[Any] | None = None

    def switch_off(self) -> None:
        """Stop echoing, in the foreground: a background process must not touch the terminal."""
        if self._terminal is None or os.tcgetpgrp(self._terminal) != os.getpgrp():
            return
        self._before = termios.tcgetattr(self._terminal)
        silent = termios.tcgetattr(self._terminal)
        silent[3] &= ~termios.ECHO
        self._set(self._terminal, silent)

    def restore(self) -> None:
        """Echo again as before `switch_off`."""
        if self._terminal is not None and self._before is not None:
            self._set(self._terminal, self._before)
            self._before = None

    @staticmethod
    def _set(terminal: int, attributes: list[Any]) -> None:
        # a process that has been moved to the background meanwhile would be stopped
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            with suppress(OSError, termios.error):  # the terminal is gone
                termios.tcsetattr(terminal, termios.TCSANOW, attributes)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

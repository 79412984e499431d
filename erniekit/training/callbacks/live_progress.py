"""Progress on a terminal: a bar with the time left, and the latest figures under it. Evaluations scroll past above."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from erniekit.training.callbacks import Callback, Record, TrainingRun
from erniekit.training.callbacks.console import evaluation_line, format_metrics


class LiveProgress(Callback):
    """Redrawn a few times a second; lines printed meanwhile appear above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("training")
        self._metrics = Text("")
        self._live = Live(get_renderable=self._display, console=self._console, refresh_per_second=4)

    def on_train_begin(self, run: TrainingRun) -> None:
        self._bar.reset(self._task, total=run.total_steps, completed=run.first_step)
        self._live.start()

    def on_step(self, record: Record) -> None:
        self._bar.update(self._task, completed=record["step"])
        self._metrics = Text(format_metrics(record), overflow="ellipsis", no_wrap=True)

    def on_evaluate(self, record: Record) -> None:
        self._console.print(evaluation_line(record), highlight=False)

    def on_save(self, folder: Path) -> None:
        self._console.print(f"saved {folder}", highlight=False)

    def close(self) -> None:
        self._live.stop()

    def _display(self) -> Group:
        return Group(self._bar, self._metrics)

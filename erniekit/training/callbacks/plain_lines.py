"""Progress as plain lines, for logs and pipes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from erniekit.training.callbacks.text import duration, evaluation_line, format_metrics


def _print_flushed(line: str) -> None:
    print(line, flush=True)  # a pipe would hold lines back for kilobytes


class PlainLines:
    """One line for every log, evaluation and checkpoint."""

    def __init__(self, say: Callable[[str], None] = _print_flushed) -> None:
        self._say = say
        self._first = self._total = 0
        self._started = 0.0

    def on_train_begin(self, first_step: int, total_steps: int) -> None:
        self._first, self._total, self._started = first_step, total_steps, time.perf_counter()

    def on_log(self, record: Mapping[str, Any]) -> None:
        step = record["step"]
        per_step = (time.perf_counter() - self._started) / max(1, step - self._first)
        left = duration(per_step * (self._total - step))
        self._say(f"step {step}/{self._total}  {format_metrics(record)}  left {left}")

    def on_evaluate(self, record: Mapping[str, Any]) -> None:
        self._say(evaluation_line(record))

    def on_save(self, folder: Path) -> None:
        self._say(f"saved {folder}")

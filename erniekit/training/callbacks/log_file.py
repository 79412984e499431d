"""`training_log.jsonl`: every log and evaluation as one line of JSON, the record that outlives the terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from erniekit.training.callbacks.unwritten import WarnOnIoError
from erniekit.training.json_file import atomic_write_text, nan_to_none

LOG_FILE = "training_log.jsonl"


class LogFile:
    """Appends records. A resumed run first drops the lines that its checkpoint knows nothing of.

    Lines for which the disk has no room are kept, and written with the next one.
    """

    def __init__(self, output_dir: Path, say: Callable[[str], None] = print) -> None:
        self._path, self._lines = output_dir / LOG_FILE, list[str]()
        self._io_errors = WarnOnIoError(str(self._path), say)

    def on_train_begin(self, first_step: int, total_steps: int) -> None:
        kept = [json.dumps(record) + "\n" for record in read_log(self._path) if record["step"] <= first_step]
        with self._io_errors.warned():
            atomic_write_text(self._path, "".join(kept) if first_step else "")

    def on_log(self, record: Mapping[str, Any]) -> None:
        self._append(record)

    def on_evaluate(self, record: Mapping[str, Any]) -> None:
        self._append(record)

    def _append(self, record: Mapping[str, Any]) -> None:
        self._lines.append(json.dumps(nan_to_none(record)) + "\n")
        with self._io_errors.warned():
            _append(self._path, "".join(self._lines))
            self._lines.clear()


def _append(path: Path, text: str) -> None:
    """Add `text`, all of it or nothing."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        if path.exists():
            os.truncate(path, size)
        raise


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a log; a last line that a killed run left unfinished is passed over."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)

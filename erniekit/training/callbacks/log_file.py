"""`training_log.jsonl`: every log and evaluation as one line of JSON, the record that outlives the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from erniekit.training.json_file import replace_text, storable

LOG_FILE = "training_log.jsonl"


class LogFile:
    """Appends records. A resumed run first drops the lines that its checkpoint knows nothing of."""

    def __init__(self, output_dir: Path) -> None:
        self._path = output_dir / LOG_FILE

    def on_train_begin(self, first_step: int, total_steps: int) -> None:
        kept = [json.dumps(record) + "\n" for record in read_log(self._path) if record["step"] <= first_step]
        replace_text(self._path, "".join(kept) if first_step else "")

    def on_log(self, record: Mapping[str, Any]) -> None:
        self._append(record)

    def on_evaluate(self, record: Mapping[str, Any]) -> None:
        self._append(record)

    def _append(self, record: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(storable(record)) + "\n")


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a log; a last line that a killed run left unfinished is passed over."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)

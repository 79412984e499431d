"""`train_results.json` and `eval_results.json`: the figures that a script or a table wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from erniekit.training.callbacks.unwritten import WarnOnIoError
from erniekit.training.json_file import write_json

RESULT_FILES = EVALUATION_FILE, TRAINING_FILE = "eval_results.json", "train_results.json"


class Results:
    """Keeps the latest evaluation and the result of the run."""

    def __init__(self, output_dir: Path, say: Callable[[str], None] = print) -> None:
        self._output_dir = output_dir
        self._io_errors = WarnOnIoError(f"results into {output_dir}", say)

    def on_evaluate(self, record: Mapping[str, Any]) -> None:
        with self._io_errors.warned():
            write_json(self._output_dir / EVALUATION_FILE, record)

    def on_train_end(self, result: Any) -> None:
        with self._io_errors.warned():
            write_json(self._output_dir / TRAINING_FILE, result.record())

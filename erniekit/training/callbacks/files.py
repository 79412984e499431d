"""`training_log.jsonl`: every log and evaluation as one line of JSON, the record that outlives the terminal."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from erniekit.redaction import redacted
from erniekit.training.callbacks import Callback, Record, TrainingRun
from erniekit.training.checkpoint.manifest import atomic_write_text, nan_to_none, write_json

if TYPE_CHECKING:
    from erniekit.training.result import TrainResult

logger = logging.getLogger(__name__)

# Files beside a run, none of which is worth ending it: one that cannot be written is told, and training goes on.


class WarnOnIoError:
    """Warns that something cannot be written, once until it can again.

    Args:
        what: the name of the file or files, for the message.
        kinds: the errors that end no run. Where they are not only those of the disk, just the first is told.
    """

    def __init__(self, what: str, kinds: type[Exception] = OSError) -> None:
        self._what, self._kinds, self._warned = what, kinds, False

    @contextmanager
    def warned(self) -> Iterator[None]:
        """Inside, an error becomes a message."""
        try:
            yield
        except self._kinds as error:
            if not self._warned:
                reason = redacted(str(getattr(error, "strerror", None) or error or type(error).__name__))
                logger.warning(f"could not write {self._what}: {reason}; the run goes on")
            self._warned = True
        else:
            self._warned = self._warned and self._kinds is not OSError


LOG_FILE = "training_log.jsonl"


class LogFile(Callback):
    """Appends records. A resumed run first drops the lines that its checkpoint knows nothing of.

    Lines for which the disk has no room are kept, and written with the next one.
    """

    def __init__(self, output_dir: Path) -> None:
        self._path, self._lines = output_dir / LOG_FILE, list[str]()
        self._io_errors = WarnOnIoError(str(self._path))

    def on_train_begin(self, run: TrainingRun) -> None:
        kept = [json.dumps(record) + "\n" for record in read_log(self._path) if record["step"] <= run.first_step]
        with self._io_errors.warned():
            atomic_write_text(self._path, "".join(kept) if run.first_step else "")

    def on_log(self, record: Record) -> None:
        self._append(record)

    def on_evaluate(self, record: Record) -> None:
        self._append(record)

    def _append(self, record: Record) -> None:
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


# `train_results.json` and `eval_results.json`: the figures that a script or a table wants.

RESULT_FILES = EVALUATION_FILE, TRAINING_FILE = "eval_results.json", "train_results.json"


class Results(Callback):
    """Keeps the latest evaluation and the result of the run."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._io_errors = WarnOnIoError(f"results into {output_dir}")

    def on_evaluate(self, record: Record) -> None:
        with self._io_errors.warned():
            write_json(self._output_dir / EVALUATION_FILE, record)

    def on_train_end(self, result: TrainResult) -> None:
        with self._io_errors.warned():
            write_json(self._output_dir / TRAINING_FILE, result.record())


LOSS_CURVE_FILE = "loss.png"  # drawn by `loss_curve`
SAMPLES_FILE = "eval_samples.jsonl"  # the answers of the last evaluation, written where they are given

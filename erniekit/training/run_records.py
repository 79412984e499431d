"""Read what runs have written down: the lines of `training_log.jsonl`, of one run that may still go on.

`erniekit plot` draws them; whatever else compares runs reads them here, too. Needs neither Paddle nor NumPy.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from erniekit.errors import DataError
from erniekit.training.callbacks.files import LOG_FILE

STEPS, TOKENS, HOURS = AXES = "steps", "tokens", "hours"
_EVALUATED = "eval_"  # begins the names of an evaluation's figures

Record = dict[str, Any]
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class RunRecords:
    """The records of one run, in the order of its steps.

    Attributes:
        path: the file that was read.
        name: the name of the run's folder.
        trained: means of the steps since the record before: "step", "epoch", "loss", "tokens" and others by name.
        evaluated: evaluations: "step", "epoch", "eval_loss" and others.
    """

    path: Path
    name: str
    trained: Sequence[Record]
    evaluated: Sequence[Record]

    @property
    def figures(self) -> list[str]:
        """The names of all figures, without `eval_`, in the order in which they appear."""
        records = (*self.trained, *self.evaluated)
        names = dict.fromkeys(name.removeprefix(_EVALUATED) for record in records for name in record)
        return [name for name in names if name not in ("step", "epoch")]

    def points(self, figure: str, axis: str = STEPS) -> tuple[Points, Points]:
        """Return a figure over an axis, of training and of evaluations; without values that are not finite.

        Args:
            axis: "steps", "tokens" (that were read, without padding) or "hours" (in steps, without evaluation).

        Raises:
            DataError: the records do not tell the axis, because an older version wrote them.
        """
        places = self._places(axis)
        steps = [record["step"] for record in self.trained]
        trained = [
            (place, float(record[figure]))
            for place, record in zip(places, self.trained, strict=True)
            if record.get(figure) is not None
        ]
        evaluated = []
        for record in self.evaluated:
            if (value := record.get(_EVALUATED + figure)) is not None:
                reached = bisect_right(steps, record["step"])
                place = float(record["step"]) if axis == STEPS else places[reached - 1] if reached else 0.0
                evaluated.append((place, float(value)))
        return trained, evaluated

    def _places(self, axis: str) -> list[float]:
        if axis == STEPS:
            return [float(record["step"]) for record in self.trained]
        if any("tokens" not in record for record in self.trained):
            raise DataError(f"{self.path}: its records do not count tokens, so --x {axis} is not known; --x steps is")
        tokens = [float(record["tokens"]) for record in self.trained]
        if axis == TOKENS:
            return tokens
        hours, places = 0.0, []
        for before, now, record in zip([0.0, *tokens], tokens, self.trained, strict=False):
            speed = record.get("tokens_per_second")
            hours += (now - before) / speed / 3600 if speed else 0.0
            places.append(hours)
        return places


def read_run(path: Path) -> RunRecords:
    """Read the records of a run.

    The last line of a run that goes on may be unfinished, and is passed over. Where steps go back, because a run was
    continued from an earlier checkpoint, the later lines count.

    Args:
        path: the `output_dir` of a run, or its `training_log.jsonl`.

    Raises:
        DataError: there is no such file, a line of it is no record, or it holds none.
    """
    file = path / LOG_FILE if path.is_dir() else path
    trained: list[Record] = []
    evaluated: list[Record] = []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.endswith("\n") and line.strip():
                    record = _record(file, number, line)
                    own = trained if "loss" in record else evaluated
                    for records in (trained, evaluated):
                        while records and records[-1]["step"] >= record["step"] + (records is not own):
                            records.pop()
                    own.append(record)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(_unreadable(path, file, error)) from None
    if not trained and not evaluated:
        raise DataError(f"{file}: there are no records yet; a run writes them every `logging_steps`")
    return RunRecords(file, file.resolve().parent.name, trained, evaluated)


def _record(file: Path, number: int, line: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    numbers = isinstance(record, dict) and all(
        value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
        for name, value in record.items()
        if name != "eval_sources"
    )
    if not numbers or not isinstance(record.get("step"), int):
        raise DataError(f"{file}:{number}: expected a record of a run, an object of numbers with a `step`")
    return dict(record)


def _unreadable(path: Path, file: Path, error: OSError | UnicodeDecodeError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"{file}: this is no text; give the output_dir of a run"
    if not isinstance(error, FileNotFoundError):
        return f"{file}: cannot be read: {error.strerror}"
    if not path.exists():
        return f"{path} does not exist; give the output_dir of a run"
    if (path.resolve().parent / LOG_FILE).is_file():
        return f"{path} has no {LOG_FILE}, but the folder above it has one: give {path.parent}"
    return f"{path} has no {LOG_FILE}: it is not the output_dir of a run, or logging_strategy was no"

"""Which files are read, in which format, and in what proportions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from erniekit.data.records import KINDS
from erniekit.errors import DataError


@dataclass(frozen=True, slots=True)
class Source:
    """One file of the mixture. Probabilities are relative: they are divided by their sum where they are used."""

    path: Path
    kind: str
    probability: float = 1.0


def parse_sources(paths: str, kinds: str, probabilities: str | float, *, folder: Path | None = None) -> list[Source]:
    """Read three comma-separated lists, as upstream's parameters write them, into sources.

    One kind, or the default probability 1.0, stands for all files. Relative paths are looked up in `folder` if they do
    not exist from the working directory.

    Raises:
        DataError: no path, lists of different lengths, an unknown kind, or probabilities that are not usable.
    """
    path_list, kind_list = _split(paths), _split(kinds)
    probability_list = _split(str(probabilities))
    if not path_list:
        raise DataError("no data file is named; write its path, or several separated by commas")
    if len(kind_list) == 1:
        kind_list *= len(path_list)
    if len(probability_list) == 1:
        probability_list *= len(path_list)
    if not len(path_list) == len(kind_list) == len(probability_list):
        raise DataError(
            f"{len(path_list)} data paths, {len(kind_list)} types and {len(probability_list)} probabilities: "
            "write one of each for every file, separated by commas"
        )
    unknown = sorted(set(kind_list) - set(KINDS))
    if unknown:
        raise DataError(f"data type {', '.join(unknown)}: expected one of {', '.join(KINDS)}")
    values = check_probabilities(probability_list)
    resolved = [_resolve(path, folder) for path in path_list]
    return [Source(path, kind, value) for path, kind, value in zip(resolved, kind_list, values, strict=True)]


def check_probabilities(values: Sequence[str | float]) -> list[float]:
    """The values as numbers. Raises DataError for text, NaN, infinity, negative values, and for zeros only."""
    numbers = []
    for value in values:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < 0:
            raise DataError(f"data probabilities {_join(values)}: expected numbers from 0 upwards, got {value}")
        numbers.append(number)
    if not any(numbers):
        raise DataError(f"data probabilities {_join(values)}: expected at least one above 0; nothing would be read")
    return numbers


def _resolve(path: str, folder: Path | None) -> Path:
    direct = Path(path).expanduser()
    if folder is not None and not direct.exists() and not direct.is_absolute() and (folder / direct).exists():
        return folder / direct
    return direct


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _join(values: Sequence[str | float]) -> str:
    return ", ".join(str(value) for value in values)

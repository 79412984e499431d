"""Which files are read, in which format, and in what proportions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from erniekit.errors import DataError


@dataclass(frozen=True, slots=True)
class Source:
    """One file of the mixture.

    Attributes:
        kind: one of records.KINDS.
        probability: relative to those of the other sources; 0 leaves the source out.
    """

    path: Path
    kind: str
    probability: float = 1.0


def check_probabilities(values: Sequence[str | float]) -> list[float]:
    """The values as numbers.

    Raises:
        DataError: text, NaN, infinity, a negative value, nothing but zeros, or a sum that float64 cannot hold.
    """
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
    if not math.isfinite(sum(numbers)):
        raise DataError(f"data probabilities {_join(values)}: expected numbers whose sum is finite, got infinity")
    return numbers


def _join(values: Sequence[str | float]) -> str:
    return ", ".join(str(value) for value in values)

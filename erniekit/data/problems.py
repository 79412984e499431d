"""Malformed records: found in one pass over all files, told together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from erniekit.errors import DataError

MAX_SHOWN = 20
MAX_SHOWN_NAME_LENGTH = 40  # characters


@dataclass(frozen=True, slots=True)
class RecordProblem:
    """One thing wrong with one record (or, at line 0, with the whole file)."""

    path: str
    line: int
    field: str
    expected: str
    got: str

    def __str__(self) -> str:
        location = f"{self.path}:{self.line}" if self.line else self.path
        return f"{location}: {self.field}: expected {self.expected}, got {self.got}"


@dataclass
class ProblemList:
    """Counts every problem, remembers the first few: a file of a million bad lines must not fill the memory."""

    shown: list[RecordProblem] = field(default_factory=list)
    per_path: Counter[str] = field(default_factory=Counter)

    def add(self, problem: RecordProblem) -> None:
        self.per_path[problem.path] += 1
        if len(self.shown) < MAX_SHOWN:
            self.shown.append(problem)

    @property
    def total(self) -> int:
        return sum(self.per_path.values())

    def raise_if_any(self) -> None:
        """Raises DataError: the first problems, and the totals of every file."""
        total = self.total
        if not total:
            return
        lines = [str(problem) for problem in self.shown]
        if total > len(self.shown):
            lines.append(f"... and {total - len(self.shown):,} more")
        totals = ", ".join(f"{path}: {count:,}" for path, count in self.per_path.items())
        lines.append(f"{total:,} problem{'s' if total > 1 else ''} ({totals}). Mend or remove these records.")
        raise DataError("\n".join(lines))


def shorten(value: object, limit: int = 60) -> str:
    """A value as a message can show it: its representation, cut, with its size where that tells more."""
    if isinstance(value, str) and len(value) > limit:
        return f"{value[: limit - 20]!r}... ({len(value):,} characters)"
    if isinstance(value, (list, dict)) and len(value) > 6:
        return f"a {'list' if isinstance(value, list) else 'mapping'} of {len(value):,} items"
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def field_name(name: str) -> str:
    """A field of a record as a message names it: as it is, or quoted and cut where it is no plain word."""
    return name if name.isidentifier() and len(name) <= MAX_SHOWN_NAME_LENGTH else shorten(name)

"""Check the values of records, and report malformed and skipped records of all files together."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TextIO

from erniekit.errors import DataError

MAX_SHOWN = 20
MAX_SHOWN_SKIPPED = 10
MAX_SHOWN_NAME_LENGTH = 40  # characters


class Effect(Enum):
    """What a problem does to a run: `on_bad_record` decides, the run stops, or the record is skipped in any case."""

    BY_POLICY = "by policy"
    STOP = "stop"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class RecordProblem:
    """One problem of one record or, at line 0, of the file.

    Attributes:
        effect: what it does to a run. A problem at line 0 always stops it.
    """

    path: str
    line: int
    field: str
    expected: str
    got: str
    effect: Effect = Effect.BY_POLICY

    def __str__(self) -> str:
        location = f"{self.path}:{self.line}" if self.line else self.path
        return f"{location}: {self.description}"

    @property
    def description(self) -> str:
        """The problem without its place."""
        return f"{self.field}: expected {self.expected}, got {self.got}"


@dataclass
class ProblemList:
    """Counts every problem and keeps the first few: a file of a million bad lines must not fill the memory."""

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
        """Raise DataError with the first problems and the totals of every file, if there is any problem."""
        total = self.total
        if not total:
            return
        files = {path: number for number, path in enumerate(self.per_path)}
        # a block's records are parsed before any of them is encoded, so problems are not found in the order of lines
        shown = sorted(self.shown, key=lambda problem: (files[problem.path], problem.line))
        lines = [str(problem) for problem in shown]
        if total > len(self.shown):
            lines.append(f"... and {total - len(self.shown):,} more")
        totals = ", ".join(f"{path}: {count:,}" for path, count in self.per_path.items())
        in_records = any(problem.line for problem in self.shown)
        advice = " Fix or remove these records." if in_records else ""
        if any(problem.line and problem.effect is Effect.BY_POLICY for problem in self.shown):
            advice = " Fix or remove these records, or leave them out with on_bad_record: skip."
        lines.append(f"{total:,} problem{'s' if total > 1 else ''} ({totals}).{advice}")
        raise DataError("\n".join(lines))


class SkippedRecords:
    """The records of one file that are left out: counts them, keeps the first, and writes all of them to a file.

    Args:
        path: the text file to write, a line per problem; it is created with the first one. None: write none.
        source: the file that is read; a problem in another one, such as that of a shard, is told with its place.
    """

    def __init__(self, path: Path | None = None, source: Path | None = None) -> None:
        self._path = path
        self._source = "" if source is None else str(source)
        self._file: TextIO | None = None
        self._last = ("", 0)
        self.count = 0
        self.first: list[tuple[int, str]] = []  # line and description, or 0 and the whole problem

    def add(self, problem: RecordProblem) -> None:
        elsewhere = bool(self._source) and problem.path != self._source
        if (problem.path, problem.line) != self._last:  # several problems of one record follow each other
            self.count += 1
            self._last = problem.path, problem.line
            if len(self.first) < MAX_SHOWN_SKIPPED:
                self.first.append((0, str(problem)) if elsewhere else (problem.line, problem.description))
        if self._path is not None:
            if self._file is None:
                self._file = open(self._path, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            self._file.write(f"{problem}\n" if elsewhere else f"{problem.line}: {problem.description}\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@dataclass
class SourceProblems:
    """Sorts the problems of one source into those that stop the run and records that are skipped.

    Attributes:
        stopping: the problems of all sources that stop the run.
        skipped: the records of this source that are left out.
        skips_bad_records: `on_bad_record: skip`; without it only records that train nothing are skipped.
    """

    stopping: ProblemList
    skipped: SkippedRecords
    skips_bad_records: bool = False

    def add(self, problem: RecordProblem) -> None:
        if self.skips(problem):
            self.skipped.add(problem)
        else:
            self.stopping.add(problem)

    def skips(self, problem: RecordProblem) -> bool:
        """Return whether the record of a problem is left out instead of stopping the run."""
        by_policy = self.skips_bad_records and problem.effect is Effect.BY_POLICY
        return problem.line > 0 and (by_policy or problem.effect is Effect.SKIP)

    @property
    def total(self) -> int:
        """The number of problems that stop the run."""
        return self.stopping.total

    def raise_if_any(self) -> None:
        self.stopping.raise_if_any()


def shorten(value: object, limit: int = 60) -> str:
    """Return a value's representation for a message, cut if it is long, with its size."""
    if isinstance(value, str) and len(value) > limit:
        return f"{value[: limit - 20]!r}... ({len(value):,} characters)"
    if isinstance(value, (list, dict)) and len(value) > 6:
        return f"a {'list' if isinstance(value, list) else 'mapping'} of {len(value):,} items"
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def field_name(name: str) -> str:
    """Return a record's field name for a message: unchanged, or quoted and cut if it is not an identifier."""
    return name if name.isidentifier() and len(name) <= MAX_SHOWN_NAME_LENGTH else shorten(name)


# Parsing the values of a record's fields.

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class MalformedError(Exception):
    """Raised by a parser for one record; becomes a RecordProblem with file and line."""

    effect = Effect.BY_POLICY

    def __init__(self, field: str, expected: str, got: str) -> None:
        super().__init__(field)
        self.field, self.expected, self.got = field, expected, got


class NothingToTrainError(MalformedError):
    """Raised for a well-formed record that trains nothing: an empty answer, a pair of equal answers or scores."""

    effect = Effect.SKIP


def parse_stripped_texts(record: dict, name: str) -> list[str]:
    """Return a string or a list of strings as a list, without white space around each, as upstream reads `erniekit`."""
    value = record.get(name)
    if isinstance(value, str):
        return [parse_text(value, name).strip()]
    if not isinstance(value, list) or not value:
        raise MalformedError(name, "a string or a list of strings", describe_value(value))
    return [parse_text(item, f"{name}[{number}]").strip() for number, item in enumerate(value)]


def parse_optional_text(record: dict, name: str) -> str:
    """Return the text of a field, "" if it is missing or blank."""
    value = record.get(name)
    text = "" if value is None else parse_text(value, name)
    return text if text.strip() else ""


def parse_answer(value: object, name: str) -> str:
    """Return the text of an answer that is to be trained.

    Raises:
        NothingToTrainError: it is blank.
    """
    text = parse_text(value, name)
    if not text.strip():
        raise NothingToTrainError(name, "a text", "an empty string")
    return text


def parse_question(value: object, name: str) -> str:
    """Return the text of a question, which must not be blank."""
    text = parse_text(value, name)
    if not text.strip():
        raise MalformedError(name, "a text", "an empty string")
    return text


def parse_text(value: object, name: str) -> str:
    """Return a string that UTF-8 can encode, as it is written: white space is part of it."""
    if not isinstance(value, str):
        raise MalformedError(name, "a string", describe_value(value))
    if not value.isascii() and (match := _LONE_SURROGATE.search(value)):
        raise MalformedError(name, "Unicode text", f"half of a surrogate pair at character {match.start():,}")
    return value


def parse_flag(value: object, name: str) -> bool:
    if value not in (0, 1):  # true, false, 0.0 and 1.0 are equal to these
        raise MalformedError(name, "0 or 1", shorten(value))
    return bool(value)


def describe_value(value: object) -> str:
    return "nothing" if value is None else shorten(value)


def parse_history(record: dict) -> list[tuple[str, str]]:
    """Return the earlier questions and answers of an alpaca record."""
    history = record.get("history")
    if history is None:
        return []
    if not isinstance(history, list):
        raise MalformedError("history", "a list of [question, answer] pairs", shorten(history))
    rounds = []
    for number, pair in enumerate(history):
        name = f"history[{number}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise MalformedError(name, "a pair [question, answer]", shorten(pair))
        question, answer = parse_text(pair[0], f"{name}[0]"), parse_text(pair[1], f"{name}[1]")
        if not (question.strip() and answer.strip()):
            raise MalformedError(name, "two texts", "an empty string")
        rounds.append((question, answer))
    return rounds


def split_system(record: dict, questions: list[str], answers: list[str]) -> tuple[str, list[str], list[str]]:
    """Return the system text of an erniekit record, and its questions and answers.

    With `is_system`, upstream's older way to give a system text, the first round contains it; tgt[0] is unused then.
    """
    system = parse_optional_text(record, "system").strip()
    if parse_flag(record.get("is_system", 0), "is_system"):
        system = system or questions[0]
        questions, answers = questions[1:], answers[1:]
        if not questions:
            raise MalformedError("src", "an exchange after the system text (is_system is 1)", "only the system text")
    for name, texts, error in (("src", questions, MalformedError), ("tgt", answers, NothingToTrainError)):
        for number, text in enumerate(texts):
            if not text:
                raise error(f"{name}[{number}]", "a text", "an empty string")
    return system, questions, answers


# Fields that several formats share.

SCORES = ("score_chosen", "score_rejected")
MARGIN = "margin"  # of a pair: the difference of its scores
THOUGHTS_FIELD = "reasoning_content"  # of an assistant's message
# Of a message: whether it is trained. The names of upstream, OpenAI and LLaMA-Factory.
WEIGHT_FIELDS = ("label", "weight", "loss_weight")
MESSAGE_FIELDS = frozenset({"role", "content", *WEIGHT_FIELDS})
SHAREGPT_FIELDS = frozenset({"from", "value"})
CALL_FIELDS = frozenset({"tool_calls", "function_call"})  # of an assistant's message in the format `messages`
RESULT_FIELDS = frozenset({"name", "tool_call_id"})  # of a tool's result

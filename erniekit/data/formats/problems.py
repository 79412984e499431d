"""Check the values of records, and report malformed records and unused fields of all files together."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import NamedTuple

from erniekit.data.conversation import ASSISTANT, TOOL_ROLES
from erniekit.errors import DataError

MAX_SHOWN = 20
MAX_SHOWN_NAME_LENGTH = 40  # characters


@dataclass(frozen=True, slots=True)
class RecordProblem:
    """One problem of one record or, at line 0, of the file."""

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
        lines = [str(problem) for problem in self.shown]
        if total > len(self.shown):
            lines.append(f"... and {total - len(self.shown):,} more")
        totals = ", ".join(f"{path}: {count:,}" for path, count in self.per_path.items())
        lines.append(f"{total:,} problem{'s' if total > 1 else ''} ({totals}). Fix or remove these records.")
        raise DataError("\n".join(lines))


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
    """Raised by a parser (one of PARSERS) for one record; becomes a RecordProblem with file and line."""

    def __init__(self, field: str, expected: str, got: str) -> None:
        super().__init__(field)
        self.field, self.expected, self.got = field, expected, got


def parse_texts(record: dict, name: str) -> list[str]:
    value = record.get(name)
    if isinstance(value, str):
        return [parse_text(value, name)]
    if not isinstance(value, list) or not value:
        raise MalformedError(name, "a string or a list of strings", describe_value(value))
    return [parse_text(item, f"{name}[{number}]") for number, item in enumerate(value)]


def parse_optional_text(record: dict, name: str) -> str:
    value = record.get(name)
    return "" if value is None else parse_text(value, name)


def parse_text(value: object, name: str, strip: bool = True) -> str:
    """Return a string that UTF-8 can encode. White space around a turn is dropped, as upstream does: templates add
    theirs."""
    if not isinstance(value, str):
        raise MalformedError(name, "a string", describe_value(value))
    if not value.isascii() and (match := _LONE_SURROGATE.search(value)):
        raise MalformedError(name, "Unicode text", f"half of a surrogate pair at character {match.start():,}")
    return value.strip() if strip else value


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
        if not (question and answer):
            raise MalformedError(name, "two texts", "an empty string")
        rounds.append((question, answer))
    return rounds


def split_system(record: dict, questions: list[str], answers: list[str]) -> tuple[str, list[str], list[str]]:
    """Return the system text of an erniekit record, and its questions and answers.

    With `is_system`, upstream's older way to give a system text, the first round contains it; tgt[0] is unused then.
    """
    system = parse_optional_text(record, "system")
    if parse_flag(record.get("is_system", 0), "is_system"):
        system = system or questions[0]
        questions, answers = questions[1:], answers[1:]
        if not questions:
            raise MalformedError("src", "an exchange after the system text (is_system is 1)", "only the system text")
    for name, texts in (("src", questions), ("tgt", answers)):
        for number, text in enumerate(texts):
            if not text:
                raise MalformedError(f"{name}[{number}]", "a text", "an empty string")
    return system, questions, answers


# The fields of each format, and the fields of a file that no format uses.

SCORES = ("score_chosen", "score_rejected")
FIELDS = {
    "erniekit": frozenset({"src", "tgt", "system", "label", "is_system"}),
    "alpaca": frozenset({"instruction", "input", "output", "history", "system"}),
    "messages": frozenset({"messages", "tools"}),
    "text": frozenset({"text", "tgt"}),
    "erniekit preferences": frozenset({"src", "tgt", "response", "sort", "system", "is_system"}),
    "alpaca preferences": frozenset(
        {"question", "instruction", "input", "history", "system", "chosen", "rejected", *SCORES}
    ),
    "messages preferences": frozenset({"prompt", "chosen", "rejected", *SCORES}),
}
MESSAGE_LISTS = {"messages": ("messages",), "messages preferences": ("prompt", "chosen", "rejected")}
THOUGHTS_FIELD = "reasoning_content"  # of an assistant's message
MESSAGE_FIELDS = frozenset({"role", "content", "label", "weight"})
CALL_FIELDS = frozenset({"tool_calls", "function_call"})  # of an assistant's message in the format `messages`
RESULT_FIELDS = frozenset({"name", "tool_call_id"})  # of a tool's result
# Prefixes of the names of a message's fields.
MESSAGE_PREFIXES = tuple(f"{name}[]." for names in MESSAGE_LISTS.values() for name in names)
MAX_NAMES = 100  # kept per file, because names may be data
MAX_REPORTED_NAMES = 10
MAX_NAME_LENGTH = 100  # characters kept of a name
SIMILARITY_CUTOFF = 0.8  # of difflib: accepts swapped, missing and doubled letters, but not "src_lang" for "src"


class UnusedField(NamedTuple):
    """A field that the format does not have: the number of records with it, and the line of the first."""

    name: str
    records: int
    line: int

    @property
    def shown_name(self) -> str:
        prefix = _prefix(self.name)
        return prefix + field_name(self.name.removeprefix(prefix))


class UnusedFields:
    """Counts the unused fields of one file's records."""

    def __init__(self, kind: str) -> None:
        self._kind, self._known = kind, FIELDS[kind]
        self._found: dict[str, tuple[int, int]] = {}

    def add(self, line: int, record: dict) -> None:
        """Count the unused fields of one well-formed record."""
        if not record.keys() <= self._known:
            self._count(line, record.keys() - self._known)
        for name in MESSAGE_LISTS.get(self._kind, ()):
            messages = record.get(name)
            if isinstance(messages, list):
                names = {field for message in messages for field in message.keys() - self._fields_of(message)}
                self._count(line, {f"{name}[].{field}" for field in names})

    def _fields_of(self, message: dict) -> frozenset[str]:
        role = message.get("role")
        if role == ASSISTANT:
            return MESSAGE_FIELDS | {THOUGHTS_FIELD} | (CALL_FIELDS if self._kind == "messages" else set())
        return MESSAGE_FIELDS | RESULT_FIELDS if self._kind == "messages" and role in TOOL_ROLES else MESSAGE_FIELDS

    def found(self) -> list[UnusedField]:
        """Return the first MAX_NAMES unused fields, by line and name."""
        fields = [UnusedField(name, records, line) for name, (records, line) in self._found.items()]
        return sorted(fields, key=lambda field: (field.line, field.name))

    def _count(self, line: int, names: set[str]) -> None:
        for name in sorted(name[:MAX_NAME_LENGTH] for name in names):
            if name in self._found:
                records, first = self._found[name]
                self._found[name] = records + 1, first
            elif len(self._found) < MAX_NAMES:
                self._found[name] = 1, line


def describe_unused(kind: str, fields: tuple[UnusedField, ...]) -> list[str]:
    """Return the lines of a report: one for each field that looks misspelt, and one for all others."""
    lines: list[str] = []
    others: list[str] = []
    for unused in fields:
        what = f"{unused.shown_name} ({unused.records:,} record{'s' if unused.records > 1 else ''}"
        meant = _closest_field(kind, unused.name)
        if meant and len(lines) < MAX_REPORTED_NAMES:
            lines.append(f"field not used: {what}, first at line {unused.line:,}): did you mean {meant}?")
        else:
            others.append(f"{what})")
    if others:
        rest = len(others) - MAX_REPORTED_NAMES
        more = [f"and {rest:,} others" + (" or more" if len(fields) == MAX_NAMES else "")] if rest > 0 else []
        lines.append(f"field{'s' if len(others) > 1 else ''} not used: {', '.join(others[:MAX_REPORTED_NAMES] + more)}")
    return lines


def _closest_field(kind: str, name: str) -> str | None:
    """Return the field that the name is probably a misspelling of; None if no field is close."""
    prefix = _prefix(name)
    known = MESSAGE_FIELDS if prefix else FIELDS[kind]
    close = get_close_matches(name.removeprefix(prefix).lower(), sorted(known), n=1, cutoff=SIMILARITY_CUTOFF)
    return prefix + close[0] if close else None


def _prefix(name: str) -> str:
    return next((prefix for prefix in MESSAGE_PREFIXES if name.startswith(prefix)), "")

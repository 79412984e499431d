"""The fields that each format reads, and an account of those in a file that nothing reads."""

from __future__ import annotations

from difflib import get_close_matches
from typing import NamedTuple

from erniekit.data.conversation import ASSISTANT, TOOL_ROLES
from erniekit.data.problems import field_name

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
MESSAGE_FIELDS = frozenset({"role", "content", "label", "weight"})
CALL_FIELDS = frozenset({"tool_calls", "function_call"})  # of an assistant's message in the format `messages`
RESULT_FIELDS = frozenset({"name", "tool_call_id"})  # of a tool's
# before the name of a message's field
MESSAGE_PREFIXES = tuple(f"{name}[]." for names in MESSAGE_LISTS.values() for name in names)
MAX_NAMES = 100  # that are kept of one file, whose names may be data
MAX_REPORTED_NAMES = 10
MAX_NAME_LENGTH = 100  # characters that are kept of a name
SIMILARITY_CUTOFF = 0.8  # difflib's measure: exchanged, missing and doubled letters, but not "src_lang" for "src"


class UnusedField(NamedTuple):
    """A field of a file's records that the format does not have: in how many records, and the first one's line."""

    name: str
    records: int
    line: int

    @property
    def shown_name(self) -> str:
        prefix = _prefix(self.name)
        return prefix + field_name(self.name.removeprefix(prefix))


class UnusedFields:
    """Counts the fields of one file's records that are not used."""

    def __init__(self, kind: str) -> None:
        self._kind, self._known = kind, FIELDS[kind]
        self._found: dict[str, tuple[int, int]] = {}

    def add(self, line: int, record: dict) -> None:
        """Count in one well-formed record."""
        if not record.keys() <= self._known:
            self._count(line, record.keys() - self._known)
        for name in MESSAGE_LISTS.get(self._kind, ()):
            messages = record.get(name)
            if isinstance(messages, list):
                names = {field for message in messages for field in message.keys() - self._fields_of(message)}
                self._count(line, {f"{name}[].{field}" for field in names})

    def _fields_of(self, message: dict) -> frozenset[str]:
        role = message.get("role")
        if self._kind == "messages" and role == ASSISTANT:
            return MESSAGE_FIELDS | CALL_FIELDS
        return MESSAGE_FIELDS | RESULT_FIELDS if self._kind == "messages" and role in TOOL_ROLES else MESSAGE_FIELDS

    def found(self) -> list[UnusedField]:
        """The first MOST_NAMES of them, by line and name."""
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
    """Lines of a report: one for each field that looks misspelt, and one for all the others."""
    lines: list[str] = []
    others: list[str] = []
    for field in fields:
        what = f"{field.shown_name} ({field.records:,} record{'s' if field.records > 1 else ''}"
        meant = _closest_field(kind, field.name)
        if meant and len(lines) < MAX_REPORTED_NAMES:
            lines.append(f"field not used: {what}, first at line {field.line:,}): did you mean {meant}?")
        else:
            others.append(f"{what})")
    if others:
        rest = len(others) - MAX_REPORTED_NAMES
        more = [f"and {rest:,} others" + (" or more" if len(fields) == MAX_NAMES else "")] if rest > 0 else []
        lines.append(f"field{'s' if len(others) > 1 else ''} not used: {', '.join(others[:MAX_REPORTED_NAMES] + more)}")
    return lines


def _closest_field(kind: str, name: str) -> str | None:
    """The field that the name is a misspelling of, where it is close to one."""
    prefix = _prefix(name)
    known = MESSAGE_FIELDS if prefix else FIELDS[kind]
    close = get_close_matches(name.removeprefix(prefix).lower(), sorted(known), n=1, cutoff=SIMILARITY_CUTOFF)
    return prefix + close[0] if close else None


def _prefix(name: str) -> str:
    return next((prefix for prefix in MESSAGE_PREFIXES if name.startswith(prefix)), "")

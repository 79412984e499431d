"""Count the fields of a file that its format does not use, and say what a misspelt one was meant to be."""

from __future__ import annotations

from difflib import get_close_matches
from typing import NamedTuple

from erniekit.data.conversation import ASSISTANT, TOOL_ROLES
from erniekit.data.formats.content_parts import PART_FIELDS, TEXT_PARTS, UNITS
from erniekit.data.formats.format import Format
from erniekit.data.formats.problems import (
    CALL_FIELDS,
    MESSAGE_FIELDS,
    RESULT_FIELDS,
    SHAREGPT_FIELDS,
    THOUGHTS_FIELD,
    field_name,
)

# Fields that say where a record comes from. No format uses them and no trainer reads them, so they are not reported.
BOOKKEEPING_FIELDS = frozenset({"id", "task", "source", "dataset", "category", "lang", "language"})
MAX_NAMES = 100  # kept per file, because names may be data
MAX_REPORTED_NAMES = 10
MAX_NAME_LENGTH = 100  # characters kept of a name
MISSING_SIMILARITY_CUTOFF = 0.6  # looser: the right field is missing, so something else stands in its place
SIMILARITY_CUTOFF = 0.8  # of difflib: accepts swapped, missing and doubled letters, but not "src_lang" for "src"


class UnusedField(NamedTuple):
    """A field that the format does not have: the number of records with it, and the line of the first."""

    name: str
    records: int
    line: int

    @property
    def shown_name(self) -> str:
        prefix, name = _split(self.name)
        return prefix + field_name(name)


class UnusedFields:
    """Counts the unused fields of one file's records."""

    def __init__(self, form: Format) -> None:
        self._form, self._known = form, form.fields | BOOKKEEPING_FIELDS
        self._found: dict[str, tuple[int, int]] = {}

    def add(self, line: int, record: dict) -> None:
        """Count the unused fields of one well-formed record."""
        if not record.keys() <= self._known:
            self._count(line, record.keys() - self._known)
        for alternatives in self._form.alternatives:
            given = [name for name in alternatives if record.get(name) is not None]
            self._count(line, set(given[1:]))
        for name in self._form.message_lists:
            messages = record.get(name)
            if isinstance(messages, list):
                names = {field for message in messages for field in message.keys() - self._fields_of(message)}
                self._count(line, {f"{name}[].{field}" for field in names})
                self._count(line, {f"{name}[].{field}" for message in messages for field in _unused_of_parts(message)})

    def _fields_of(self, message: dict) -> frozenset[str]:
        if "from" in message:  # ShareGPT's
            return MESSAGE_FIELDS | SHAREGPT_FIELDS
        role = message.get("role")
        if role == ASSISTANT:
            return MESSAGE_FIELDS | {THOUGHTS_FIELD} | (CALL_FIELDS if self._form.calls_tools else set())
        return MESSAGE_FIELDS | RESULT_FIELDS if self._form.calls_tools and role in TOOL_ROLES else MESSAGE_FIELDS

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


def _unused_of_parts(message: dict) -> set[str]:
    """Return the unused fields of the parts of a message that hold text or units, such as "content[].trian"."""
    return {
        f"{name}[].{field}"
        for name in ("content", "value")
        if isinstance(message.get(name), list)
        for part in message[name]
        if part.get("type") in (None, UNITS, *TEXT_PARTS) and "audio" not in part
        for field in part.keys() - PART_FIELDS
    }


def describe_unused(form: Format, fields: tuple[UnusedField, ...]) -> list[str]:
    """Return the lines of a report: one for each field that looks misspelt, and one for all others."""
    lines: list[str] = []
    others: list[str] = []
    for unused in fields:
        what = f"{unused.shown_name} ({unused.records:,} record{'s' if unused.records > 1 else ''}"
        meant = _closest_field(form, unused.name)
        if meant and len(lines) < MAX_REPORTED_NAMES:
            lines.append(f"field not used: {what}, first at line {unused.line:,}): did you mean {meant}?")
        else:
            others.append(f"{what})")
    if others:
        rest = len(others) - MAX_REPORTED_NAMES
        more = [f"and {rest:,} others" + (" or more" if len(fields) == MAX_NAMES else "")] if rest > 0 else []
        lines.append(f"field{'s' if len(others) > 1 else ''} not used: {', '.join(others[:MAX_REPORTED_NAMES] + more)}")
    return lines


def _closest_field(form: Format, name: str) -> str | None:
    """Return the field that the name is probably a misspelling of; None if no other field is close."""
    prefix, own_name = _split(name)
    known = PART_FIELDS if prefix.count("[]") > 1 else MESSAGE_FIELDS if prefix else form.fields
    close = get_close_matches(own_name.lower(), sorted(known), n=1, cutoff=SIMILARITY_CUTOFF)
    return prefix + close[0] if close and close[0] != own_name else None


def misspelling(form: Format, record: dict, missing: str) -> str | None:
    """Return the field of a record that was probably meant to be `missing`, which a parser did not find."""
    others = [str(name) for name in record.keys() - form.fields]
    swapped = [name for name in others if sorted(name.lower()) == sorted(missing)]
    close = swapped or get_close_matches(missing, others, n=1, cutoff=MISSING_SIMILARITY_CUTOFF)
    return close[0] if close else None


def _split(name: str) -> tuple[str, str]:
    """Return the prefix of a field of a message or a part ("messages[].", else "") and the field's own name."""
    head, mark, tail = name.rpartition("[].")
    return head + mark, tail

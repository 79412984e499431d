"""Translate the names of other suites (`foreign_names.py`), or say what to write in place of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from erniekit.config.foreign_hints import HINTS
from erniekit.config.foreign_names import OF_ERNIE, OF_PADDLEFORMERS, ForeignName
from erniekit.config.parse import Entry
from erniekit.config.values import format_value


def _merged(rows: list[ForeignName]) -> dict[str, ForeignName]:
    """Return the rows by name; a name of several suites keeps its first row and gets all the suites."""
    table: dict[str, ForeignName] = {}
    for row in rows:
        known = table.get(row.name)
        suites = (*known.suites, *row.suites) if known else row.suites
        table[row.name] = replace(known or row, suites=tuple(dict.fromkeys(suites)))
    return table


FOREIGN_NAMES: Mapping[str, ForeignName] = _merged([*OF_ERNIE, *OF_PADDLEFORMERS, *HINTS])


@dataclass(frozen=True)
class Translation:
    """What a foreign name stands for.

    Attributes:
        parameters: the parameters here with their values; None if the name or its value is refused.
        text: the message about it, or the problem; "" if there is nothing to tell.
    """

    parameters: Mapping[str, Any] | None
    text: str


def translate(entry: Entry) -> Translation:
    """Return what an entry whose name is in `FOREIGN_NAMES` stands for."""
    foreign = FOREIGN_NAMES[entry.name]
    written = f"`{foreign.name}: {format_value(entry.value)}` ({entry.location.origin})"
    if not foreign.read:
        return Translation(None, f"`{foreign.name}`: a name of {_owners(foreign)}: {instead(foreign, entry.value)}")
    if entry.value is None or entry.value == "":  # the default of its suite
        return Translation({}, "")
    if foreign.word:
        return Translation({foreign.word: entry.value}, f"{written} is read as {foreign.word}")
    if not foreign.values:
        return Translation({}, f"{written} has no effect: {foreign.why}")
    meant = _meant(foreign, entry.value)
    if meant is None:
        known = " or ".join(format_value(value) for value in foreign.values)
        got = format_value(entry.value)
        advice = f"; {foreign.why}" if foreign.why else ""
        return Translation(None, f"`{foreign.name}`: expected {known}, got {got}{advice}")
    words = ", ".join(f"{name}: {format_value(value)}" for name, value in meant.items())
    return Translation(meant, f"{written} is read as {words}" if words else "")


def instead(foreign: ForeignName, value: Any) -> str:
    """Return what to write in place of a foreign name, or why it does not exist here."""
    return f"write `{foreign.word}: {format_value(value)}`" if foreign.word else foreign.why


def _meant(foreign: ForeignName, value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, str):
        value = value.strip().casefold()
    if not isinstance(value, (str, int)):  # such as a list, which is no key of a table
        return None
    return foreign.values.get(value)


def _owners(foreign: ForeignName) -> str:
    *others, last = foreign.suites
    return f"{', '.join(others)} and {last}" if others else last

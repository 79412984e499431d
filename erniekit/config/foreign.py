"""Translate the names of other suites, see `foreign_names.py`: what their files mean here, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from erniekit.config.foreign_names import FOREIGN_NAMES, ForeignName
from erniekit.config.parse import Entry
from erniekit.config.values import format_value


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
        return Translation(None, f"`{foreign.name}`: expected {known}, got {got}{'; ' if foreign.why else ''}{foreign.why}")
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

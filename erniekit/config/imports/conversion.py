"""Convert settings of another program by a table, and write the YAML file that is the same here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from erniekit.config.imports.settings import Setting
from erniekit.config.json_schema import structural_problems
from erniekit.config.registry import PARAMETERS, did_you_mean
from erniekit.config.values import format_value, read_number
from erniekit.errors import ConfigurationError

WIDTH = 118  # of comments


@dataclass(frozen=True)
class Row:
    """What becomes of one key.

    Attributes:
        default: the value where the file has none. Without `to` and `only` it asks for nothing, so that it is not told.
        to: the parameter here that takes the value.
        only: the values that ask for what is done here anyway; any other is refused.
        why: why other values are refused; without `only`, why the key has no effect here; with `to`, a remark.
        read: whether code takes the value together with others.
    """

    default: Any = None
    to: str = ""
    only: tuple[Any, ...] | None = None
    why: str = ""
    read: bool = False


def taken(default: Any, to: str, remark: str = "") -> Row:
    """Return the row of a key whose value a parameter takes as it is."""
    return Row(default, to=to, why=remark)


def idle(default: Any, why: str) -> Row:
    """Return the row of a key that has no effect here, whatever its value."""
    return Row(default, why=why)


def only(default: Any, why: str, *more: Any) -> Row:
    """Return the row of a key whose default, and `more` values, ask for what is done here; `why` refuses others."""
    return Row(default, only=(default, *more), why=why)


def combined(default: Any) -> Row:
    """Return the row of a key that code reads together with others."""
    return Row(default, read=True)


class Conversion:
    """The settings of one file with the defaults of its program, and the parameters that they become.

    Attributes:
        parameters: name -> value here.
        remarks: name -> what to say behind its line.
        told: lines about keys that have no line of their own.
        problems: what is refused.
    """

    def __init__(self, settings: Iterable[Setting], table: Mapping[str, Row], file: str) -> None:
        self.parameters: dict[str, Any] = {}
        self.remarks: dict[str, str] = {}
        self.told: list[str] = []
        self.problems: list[str] = []
        self._table, self._file = table, file
        self._origins: dict[str, str] = {}
        self._settings: dict[str, Setting] = {}
        for setting in settings:
            if _is_empty_section(setting, table):
                continue
            if setting.key in table:
                self._settings.setdefault(setting.key, setting)
            else:
                self.problems.append(
                    f"{setting.location}: `{setting.key}`: unknown key{did_you_mean(setting.key, [*table])}"
                )
        self._without_a_line = {*self._settings}

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key, or its default there."""
        return self._settings[key].value if key in self._settings else self._table[key].default

    def is_set(self, key: str) -> bool:
        """Return whether the file has the key."""
        return key in self._settings

    def follow_table(self) -> None:
        """Convert every key by its row, except those that code reads."""
        for key, row in self._table.items():
            if row.read:
                continue
            value = self[key]
            if row.to:
                self.write(row.to, value, key, row.why)
            elif row.only is not None:
                if not any(_same(value, accepted) for accepted in row.only):
                    self.refuse(key, f"{format_value(value)} is not possible: {row.why}")
            elif self.is_set(key) and not _same(value, row.default):
                self.tell(key, row.why)

    def write(self, name: str, value: Any, key: str = "", remark: str = "") -> None:
        """Give a parameter its value; the line says from which key it comes, and what is to be noticed."""
        self._without_a_line.discard(key)
        self.parameters[name] = value
        self._origins[name] = key or name
        origin = "" if key.rpartition(".")[2] == name else key
        if origin and not self.is_set(key):
            origin += ", its default"
        if text := ": ".join(part for part in (origin, remark) if part):
            self.remarks[name] = text

    def tell(self, key: str, why: str) -> None:
        """Say what becomes of a key that has no line of its own."""
        self._without_a_line.discard(key)
        self.told.append(f"{key}: {_shown(self[key])}: {why}")

    def refuse(self, key: str, what: str) -> None:
        """Add a problem with the value of a key."""
        setting = self._settings.get(key)
        where = str(setting.location) if setting else self._file
        tail = "" if setting else " (the default there)"
        self.problems.append(f"{where}: `{key}`{tail}: {what}")

    def number(self, key: str, least: float = -math.inf) -> float:
        """Return the number of a key; what is none, or smaller than `least`, is a problem, and gives the default."""
        value = read_number(self[key])
        if isinstance(value, float) and value >= least:
            return value
        self.refuse(key, f"expected a number{f' of at least {least:g}' if least > -math.inf else ''}")
        return float(read_number(self._table[key].default))

    def raise_if_any(self) -> None:
        """Raise ConfigurationError with all problems."""
        read = {name: PARAMETERS[name].read(value) for name, value in self.parameters.items()}
        for name, what in structural_problems(read):
            self.refuse(self._origins[name], f"as `{name}` {what}")
        if not self.problems:
            return
        if len(self.problems) == 1:
            raise ConfigurationError(self.problems[0])
        lines = "\n".join(f"  {line}" for line in self.problems)
        raise ConfigurationError(f"{len(self.problems)} problems in the configuration\n{lines}")

    def yaml(self, head: Iterable[str]) -> str:
        """Return the file: `head` as a comment, a line for each parameter, and what is told as comments."""
        lines = [f"# {line}".rstrip() for line in head]
        lines.append("")
        for name in sorted(self.parameters, key=[*PARAMETERS].index):
            remark = f"   # {self.remarks[name]}" if name in self.remarks else ""
            value = self.parameters[name]
            if (
                PARAMETERS[name].kind.names_path
                and isinstance(value, list)
                and (len(value) > 1 or "," in "".join(value))
            ):
                lines += [f"{name}:{remark}", *(f"  - {yaml_value(item)}" for item in value)]
            else:
                lines.append(f"{name}: {yaml_value(value)}{remark}")
        told = [line for text in self.told for line in _comment(text)]
        if rest := [key for key in self._table if key in self._without_a_line]:
            told += _comment(f"what is done here anyway, or is in the lines above: {', '.join(rest)}")
        if told:
            lines += ["", "# Keys without a line here:", *told]
        return "\n".join(lines) + "\n"


def _is_empty_section(setting: Setting, table: Mapping[str, Row]) -> bool:
    """Return whether a key that stands above keys of the table has nothing below it."""
    below = (f"{setting.key}.", f"{setting.key}[].")
    return _is_empty(setting.value) and any(key.startswith(below) for key in table)


def yaml_value(value: Any) -> str:
    """Return a value as a YAML scalar that `erniekit.config.parse` reads back; lists become one text with commas."""
    if isinstance(value, (list, tuple)):
        return yaml_value(",".join(_plain(item) for item in value)) if value else "[]"
    if value is None or isinstance(value, bool):
        return format_value(value)
    if isinstance(value, (int, float)):
        return _plain(value)
    text = str(value)
    try:
        same = yaml.safe_load(text) == text and not {"\n", "#"} & set(text)
    except yaml.YAMLError:
        same = False
    return text if same else json.dumps(text, ensure_ascii=False)


def _plain(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    if value.is_integer() and abs(value) < 1e15:
        return f"{value:.1f}"
    text = repr(value)
    return text.replace("e", ".0e") if "e" in text and "." not in text else text


def _comment(text: str) -> list[str]:
    words, lines = text.split(" "), ["# -"]
    for word in words:
        if len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append("#  ")
        lines[-1] += f" {word}"
    return lines


def _shown(value: Any) -> str:
    return format_value(value if not isinstance(value, dict) else json.dumps(value, ensure_ascii=False))


def _same(one: Any, other: Any) -> bool:
    """Return whether two values ask for the same: 0 and 0.0 do, 1 and true do not; an empty value stands for null."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, str) and isinstance(other, str):
        return one.casefold() == other.casefold()
    return bool(one == other) or (_is_empty(one) and _is_empty(other))


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [], {})

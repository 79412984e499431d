"""Read a configuration file or the overrides of a command line into entries: name, value as written, and location.

YAML files are composed, not loaded, so that every name keeps its line and a repeated name is detected. Only plain
values and lists of them are accepted; tags, nested mappings and merge keys have no meaning in a flat file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from erniekit.errors import ConfigurationError

MAX_FILE_BYTES = 1_000_000  # bytes; a configuration takes a few thousand
MAX_LIST_DEPTH = 3
_NON_DECIMAL_NUMBER = re.compile(r"[-+]?(0[0-7_]+|[0-9_]+(:[0-9_]+)+(\.[0-9_]*)?)")  # octal and sexagesimal numbers


@dataclass(frozen=True)
class SourceLocation:
    """Where a value was written.

    Attributes:
        file: the path of the file as the user wrote it, or "" for the command line.
        line: the line number from 1; 0 if there is none.
        alias: the alias that the user wrote instead of the parameter, if any.
    """

    file: str
    line: int = 0
    alias: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file and self.line else self.file or "command line"

    @property
    def origin(self) -> str:
        """A short form for tables: "sft.yaml:12", "compute_type (sft.yaml:3)"."""
        short = f"{Path(self.file).name}:{self.line}" if self.file and self.line else str(self)
        return f"{self.alias} ({short})" if self.alias else short


@dataclass(frozen=True)
class Entry:
    """One parameter as the user wrote it.

    Attributes:
        text: on the command line, the value before YAML parsed it, since `output_dir=2024` names a folder.
    """

    name: str
    value: Any
    location: SourceLocation
    text: str | None = None


@dataclass(frozen=True)
class Problem:
    """An error that the user must correct.

    Attributes:
        name: the parameter, or the word that the user wrote in its place; "" for the file as a whole.
    """

    text: str
    location: SourceLocation | None = None
    name: str = ""

    def __str__(self) -> str:
        return f"{self.location}: {self.text}" if self.location else self.text


def read_file(path: Path) -> tuple[list[Entry], list[Problem]]:
    """Return the entries of a YAML or JSON file, in order, and the problems with its syntax; see `read_pairs`."""
    return entries_from(read_pairs(path), path)


def read_pairs(path: Path) -> list[tuple[str, Any, int]]:
    """Return the (name, value, line) triples of a YAML or JSON file; a nested structure is an object of its own type.

    Raises:
        ConfigurationError: the file cannot be read or is not a mapping.
    """
    return pairs_from_text(_read_text(path), path)


def pairs_from_text(text: str, path: Path) -> list[tuple[str, Any, int]]:
    """Return what `read_pairs` does of a text that is not in a file yet.

    Args:
        path: the file as messages name it; `.json` makes it JSON.

    Raises:
        ConfigurationError: the text is not a mapping.
    """
    try:
        return _json_pairs(text, path) if path.suffix.lower() == ".json" else _yaml_pairs(text, path)
    except RecursionError:
        raise ConfigurationError(f"{path}: values are nested too deeply; parameters are flat") from None


def entries_from(pairs: Iterable[tuple[str, Any, int]], path: Path) -> tuple[list[Entry], list[Problem]]:
    """Return the entries of what `read_pairs` has read, and a problem for each repeated name and nested structure."""
    entries: dict[str, Entry] = {}
    problems: list[Problem] = []
    for name, value, line in pairs:
        location = SourceLocation(str(path), line)
        if isinstance(value, _Unusable):
            problems.append(Problem(f"`{name}`: {value.reason}", location, name))
        elif name in entries:
            first = entries[name].location.line
            text = f"`{name}` is written twice, first at line {first}; remove one"
            problems.append(Problem(text, location, name))
        else:
            entries[name] = Entry(name, value, location)
    return list(entries.values()), problems


def read_overrides(words: Iterable[str]) -> tuple[list[Entry], list[Problem]]:
    """Return the entries of `name=value` overrides, and the problems with their syntax; values are parsed as YAML."""
    entries: dict[str, Entry] = {}
    problems: list[Problem] = []
    for word in words:
        name, equals, text = word.partition("=")
        name = name.strip().removeprefix("--")
        if not equals or not name:
            problems.append(Problem(f"`{word}` is not of the form name=value", SourceLocation("")))
        elif name in entries:
            problems.append(Problem(f"`{name}` is given twice; remove one", SourceLocation("")))
        else:
            entries[name] = Entry(name, _override_value(text), SourceLocation(""), text)
    return list(entries.values()), problems


@dataclass(frozen=True)
class _Unusable:
    reason: str


def _read_text(path: Path) -> str:
    try:
        if path.is_dir():
            raise ConfigurationError(f"{path}: is a folder; name a YAML or JSON file")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigurationError(f"{path}: is larger than 1 MB; is this a data file?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _yaml_pairs(text: str, path: Path) -> list[tuple[str, Any, int]]:
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
    except yaml.YAMLError as error:
        raise ConfigurationError(_yaml_message(error, path)) from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigurationError(f"{path}:{_line(root)}: expected lines of the form `name: value`")
    pairs = []
    for key, value in root.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else "?"
        pairs.append((name, _yaml_value(loader, value), _line(key)))
    return pairs


def _yaml_value(loader: yaml.SafeLoader, node: yaml.Node, depth: int = 0) -> Any:
    if isinstance(node, yaml.SequenceNode) and depth < MAX_LIST_DEPTH:
        items = [_yaml_value(loader, item, depth + 1) for item in node.value]
        return next((item for item in items if isinstance(item, _Unusable)), items)
    if not isinstance(node, yaml.ScalarNode):
        return _Unusable("is a nested structure; parameters are flat: one line `name: value` each")
    implicit = loader.resolve(yaml.ScalarNode, node.value, (node.style is None, node.style is not None))
    if node.tag == "tag:yaml.org,2002:timestamp" and node.tag == implicit:
        return node.value  # a folder may well be called 2025-01-31
    if node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float") and _NON_DECIMAL_NUMBER.fullmatch(node.value):
        return _Unusable(
            f"YAML 1.1 does not read {node.value} as a decimal number (1:30 is 90, 010 is 8); "
            "write it without a colon or leading zero, or in quotes if it is a string"
        )
    if node.tag != implicit:
        return _Unusable(f"YAML tags such as {node.tag.rsplit(':', 1)[-1]} are not used here; write the plain value")
    try:
        return loader.construct_object(node)
    except (yaml.YAMLError, ValueError):
        return _Unusable("cannot be read as a YAML value; put it in quotes")


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _yaml_message(error: yaml.YAMLError, path: Path) -> str:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read"
    context = getattr(error, "context", None)
    context_mark = getattr(error, "context_mark", None)
    location = f"{path}:{mark.line + 1}" if mark else str(path)
    since = f" ({context}{f' begun at line {context_mark.line + 1}' if context_mark else ''})" if context else ""
    return f"{location}: not valid YAML: {what}{since}"


def _override_value(text: str) -> Any:
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        value = "" if node is None else _yaml_value(loader, node)
    except (yaml.YAMLError, RecursionError):
        return text
    return text if isinstance(value, _Unusable) else value


def _json_pairs(text: str, path: Path) -> list[tuple[str, Any, int]]:
    """Return the (name, value, line) triples of a JSON object, read one by one so that each keeps its line."""
    decoder, position, pairs = json.JSONDecoder(), 0, []
    try:
        position = _skip(text, position, "{")
        if text[position : position + 1] == "}":
            position += 1
        else:
            while True:
                line = text.count("\n", 0, position) + 1
                name, position = decoder.raw_decode(text, position)
                position = _skip(text, position, ":")
                value, position = decoder.raw_decode(text, position)
                pairs.append((name if isinstance(name, str) else "?", _json_value(value), line))
                position = _skip(text, position)
                if text[position : position + 1] == "}":
                    position = _skip(text, position, "}")
                    break
                position = _skip(text, position, ",")
        if text[position:].strip():
            raise json.JSONDecodeError("text after the end of the object", text, position)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{path}:{error.lineno}: not a JSON object of parameters: {error.msg}") from None
    except ValueError as error:  # an integer of more digits than Python reads
        raise ConfigurationError(f"{path}: not valid JSON: {error}") from None
    return pairs


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return _Unusable("is a nested structure; parameters are flat")
    return value


def _skip(text: str, position: int, wanted: str = "") -> int:
    """Return the position after white space, the `wanted` character if any, and white space again."""
    while text[position : position + 1].isspace():
        position += 1
    if wanted:
        if text[position : position + 1] != wanted:
            raise json.JSONDecodeError(f"expected {wanted!r}", text, position)
        position = _skip(text, position + 1)
    return position

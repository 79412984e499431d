"""Read nested YAML and JSON files into settings: the path of a key, its value, and the line where it stands."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from erniekit.config.parse import MAX_FILE_BYTES, SourceLocation
from erniekit.errors import ConfigurationError


@dataclass(frozen=True)
class Setting:
    """One value of a file.

    Attributes:
        key: its path without the numbers of list items, as tables name it: `models[].experimental.hf`.
        item: the numbers of the list items on the way to it, from 0.
    """

    key: str
    item: tuple[int, ...]
    value: Any
    location: SourceLocation


def read_settings(path: Path, keys: Collection[str], overrides: Iterable[str] = ()) -> list[Setting]:
    """Return the settings of a file in its order.

    A mapping or a list of mappings whose key is in `keys` is one value; any other is entered.

    Args:
        path: a JSON file where it ends with `.json`, else a YAML file; both are mappings.
        keys: the keys that a table has.
        overrides: `KEY=VALUE` words of the command line, which replace values of the file or add to them.

    Raises:
        ConfigurationError: the file cannot be read, is none of these, or has a key twice.
    """
    try:
        text = _read_text(path)
        root = _json_root(text, path) if path.suffix.lower() == ".json" else _yaml_root(text, path)
        settings = list(_walk(root, "", (), str(path), frozenset(keys)))
    except RecursionError:
        raise ConfigurationError(f"{path}: values are nested too deeply") from None
    seen: dict[tuple[str, tuple[int, ...]], Setting] = {}
    for setting in settings:
        other = seen.setdefault((setting.key, setting.item), setting)
        if other is not setting:
            raise ConfigurationError(f"{setting.location}: `{setting.key}` is written twice, first at {other.location}")
    given = dict(_override(word) for word in overrides)
    kept = [setting for setting in settings if setting.key not in given]
    return [*kept, *given.values()]


def _override(word: str) -> tuple[str, Setting]:
    key, _, text = word.partition("=")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text

    return key, Setting(key, (), value, SourceLocation(""))


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes() if path.stat().st_size <= MAX_FILE_BYTES else None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if data is None:
        raise ConfigurationError(f"{path}: is larger than 1 MB; is this a configuration?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: is not UTF-8 text (byte {error.start})") from None


def _json_root(text: str, path: Path) -> yaml.Node:
    """Return the nodes of a JSON text, which is YAML once it is known to be JSON."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{path}:{error.lineno}: is no JSON: {error.msg}") from None
    except ValueError as error:  # an integer of more digits than Python reads
        raise ConfigurationError(f"{path}: is no JSON: {error}") from None
    return _yaml_root(text.replace("\t", " "), path)  # tabs stand between the values of JSON, never in a text


def _yaml_root(text: str, path: Path) -> yaml.Node:
    try:
        root = yaml.SafeLoader(text).get_single_node()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigurationError(f"{path}{line}: is no YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigurationError(f"{path}: expected keys with values, as in `key: value`")
    return root


def _walk(
    node: yaml.MappingNode, above: str, item: tuple[int, ...], file: str, keys: frozenset[str]
) -> Iterator[Setting]:
    for name, value in node.value:
        location = SourceLocation(file, int(name.start_mark.line) + 1)
        key = f"{above}{name.value}" if isinstance(name, yaml.ScalarNode) else f"{above}?"
        listed = isinstance(value, yaml.SequenceNode) and any(
            isinstance(part, yaml.MappingNode) for part in value.value
        )
        if key in keys or not (isinstance(value, yaml.MappingNode) or listed):
            yield Setting(key, item, _value(value, location), location)
        elif isinstance(value, yaml.MappingNode):
            yield from _walk(value, f"{key}.", item, file, keys)
        else:
            for number, part in enumerate(value.value):
                if not isinstance(part, yaml.MappingNode):
                    raise ConfigurationError(f"{location}: `{key}`: item {number + 1} is no mapping, and others are")
                yield from _walk(part, f"{key}[].", (*item, number), file, keys)


def _value(node: yaml.Node, location: SourceLocation) -> Any:
    """Return the value of a node. Plain numbers are read as JSON does where YAML 1.1 sees text: 1e-4."""
    loader = yaml.SafeLoader("")
    try:
        value = loader.construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError) as error:
        reason = getattr(error, "problem", None) or error
        raise ConfigurationError(f"{location}: cannot be read as a YAML value: {reason}") from None
    if isinstance(node, yaml.ScalarNode) and node.style is None and isinstance(value, str):
        try:
            return float(value) if value.isascii() and value[:1] in "0123456789+-." else value
        except ValueError:
            return value
    return value

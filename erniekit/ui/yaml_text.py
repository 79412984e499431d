"""Change one line of a configuration's YAML text; comments, order and everything else stay as they are."""

from __future__ import annotations

import json

import yaml

from erniekit.config.parameter import Parameter
from erniekit.errors import ConfigurationError


def written_values(text: str) -> dict[str, str]:
    """Return what the text writes for each name, as a field of a form shows it; {} if it is no YAML mapping."""
    try:
        pairs = _pairs(text)
    except ConfigurationError:
        return {}
    return {key.value: _shown(value) for key, value in pairs if isinstance(key, yaml.ScalarNode)}


def with_value(text: str, parameter: Parameter, value: str | None) -> str:
    """Return the text with another value for a parameter.

    Args:
        value: as typed into a field; None removes the line.

    Raises:
        ConfigurationError: the text is no YAML mapping with one name on each line.
    """
    found = [pair for pair in _pairs(text) if pair[0].value == parameter.name]
    if not found:
        if value is None:
            return text
        line = f"{parameter.name}: {_rendered(parameter, value)}\n"
        return text + line if not text or text.endswith("\n") else f"{text}\n{line}"
    key, node = found[0]
    if text[text.rfind("\n", 0, key.start_mark.index) + 1 : key.start_mark.index].strip():
        raise ConfigurationError(f"`{parameter.name}` does not begin a line; change it in the text")
    end = _end(text, node)
    if value is None:
        newline = text.find("\n", end)
        rest = "" if newline < 0 else text[newline + 1 :]
        return text[: text.rfind("\n", 0, key.start_mark.index) + 1] + rest
    colon = text.index(":", key.end_mark.index)
    lost = "\n" if text[colon + 1 : end].endswith("\n") else ""
    return f"{text[: colon + 1]} {_rendered(parameter, value)}{lost}{text[end:]}"


def _pairs(text: str) -> list[tuple[yaml.Node, yaml.Node]]:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        raise ConfigurationError("the text is not valid YAML; correct it before you change a field") from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        raise ConfigurationError("the text does not have a line `name: value` for each parameter; change it there")
    return list(root.value)


def _end(text: str, node: yaml.Node) -> int:
    """Return where a value ends. PyYAML lets a block end where the next line begins, behind comments."""
    end = int(node.end_mark.index)
    if isinstance(node, yaml.SequenceNode) and not node.flow_style:
        lines = text[:end].splitlines(keepends=True)
        while not lines[-1].strip() or lines[-1].lstrip().startswith("#"):
            end -= len(lines.pop())
        end -= len(lines[-1]) - len(lines[-1].rstrip())
    return end


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    if isinstance(node, yaml.SequenceNode):  # of scalars: an item may contain itself
        return ", ".join(str(item.value) for item in node.value if isinstance(item, yaml.ScalarNode))
    return ""


def _rendered(parameter: Parameter, value: str) -> str:
    """Return a typed value as YAML on one line: as it is where that means the same, otherwise in quotes."""
    plain = value.strip()
    try:
        node = yaml.compose(f"x: {plain}", Loader=yaml.SafeLoader).value[0][1]
    except (yaml.YAMLError, AttributeError, IndexError, RecursionError):
        return _quoted(value)
    if len(plain.splitlines()) != 1:
        return _quoted(value)
    if isinstance(node, yaml.SequenceNode) and not parameter.kind.is_text:
        return plain
    is_text = node.tag == "tag:yaml.org,2002:str"
    same = isinstance(node, yaml.ScalarNode) and node.style is None and node.value == plain
    return plain if same and (is_text or not parameter.kind.is_text) else _quoted(value)


def _quoted(value: str) -> str:
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in quoted)

"""Check a configuration that is being written: its problems at their parameters, with the words of `validate`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from erniekit.build.input_paths import report_missing_paths
from erniekit.build.preflight import preflight
from erniekit.config import Config
from erniekit.config.config import InvalidConfigurationError
from erniekit.config.parameter import DEFAULT, ConfigBuilder
from erniekit.config.registry import ALIASES, PARAMETERS
from erniekit.config.values import format_value
from erniekit.errors import ConfigurationError, UserError
from erniekit.ui.workspace import Workspace
from erniekit.ui.yaml_text import written_values

_NAMED = (re.compile(r"`(\w+)`"), re.compile(r"\b[a-z]+(?:_[a-z0-9]+)+\b"))  # of a parameter in a message
_LINE = re.compile(r":(\d+): ")


@dataclass
class Checked:
    """What is known of a text.

    Attributes:
        config: None if there are problems.
        problems: `name` of the parameter ("" for the file), `line` (0: none), `text` as `validate` prints it.
        values: parameters that are set or whose default follows from others: `text`, `origin`, `set`.
        notes: lines about what was changed or has no effect.
    """

    config: Config | None = None
    problems: list[dict[str, Any]] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def check_text(text: str, name: str, workspace: Workspace, *, ranks: int | None = None) -> Checked:
    """Check the text of a configuration as `erniekit validate` does its file; the disk is read, nothing is run.

    Args:
        name: of the file, for messages.
        ranks: of the layout; None: as few as it needs.
    """
    checked, builders = Checked(), list[ConfigBuilder]()

    def inspect(builder: ConfigBuilder) -> None:
        builders.append(builder)
        outside = list(workspace.outside(builder))
        for parameter, what in outside:
            builder.problem(parameter, what, "start `erniekit ui` with --also FOLDER to let runs read there")
        if not outside:
            report_missing_paths(builder)

    try:
        checked.config = Config.from_text(text, Path(name), inspect=inspect)
        checked.notes += checked.config.messages
        checked.notes += preflight(checked.config, world_size=ranks).notes
    except InvalidConfigurationError as error:
        checked.problems += [
            _problem(str(each), each.name, each.location.line if each.location else 0) for each in error.problems
        ]
    except (ConfigurationError, UserError) as error:
        checked.problems += [_told(line) for line in _paragraphs(str(error))]
    for builder in builders:
        checked.values = {name: _value(builder, name) for name in PARAMETERS if builder.origins[name] != DEFAULT}
    checked.config = None if checked.problems else checked.config
    return checked


def answer(text: str, checked: Checked) -> dict[str, Any]:
    """Return what the page shows of a checked text, as JSON holds it."""
    return {
        "text": text,
        "written": written_values(text),
        "problems": checked.problems,
        "values": checked.values,
        "notes": checked.notes,
        "valid": checked.config is not None,
    }


def _value(builder: ConfigBuilder, name: str) -> dict[str, Any]:
    origin = builder.origins[name]
    return {"text": format_value(builder[name]), "origin": origin, "set": not origin.startswith(DEFAULT)}


def _problem(text: str, name: str, line: int) -> dict[str, Any]:
    alias = ALIASES.get(name)
    return {"name": alias.target or name if alias else name, "line": line, "text": text}


def _told(text: str) -> dict[str, Any]:
    """Return a message of a check; it belongs to the first parameter that it names."""
    named = next((name for pattern in _NAMED for name in pattern.findall(text) if name in PARAMETERS), "")
    line = _LINE.search(text)
    return _problem(text, named, int(line[1]) if line else 0)


def _paragraphs(text: str) -> list[str]:
    """Divide a message of several checks; lines that begin with a space belong to the one before."""
    paragraphs: list[str] = []
    for line in text.splitlines():
        if paragraphs and line.startswith(" "):
            paragraphs[-1] += f"\n{line}"
        else:
            paragraphs.append(line)
    return paragraphs

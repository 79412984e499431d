"""A configuration while it is being worked out: values, where they come from, problems and messages so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from erniekit.parameters.entries import Entry, Problem, SourceLocation
from erniekit.parameters.values import format_value

if TYPE_CHECKING:
    from erniekit.parameters.declaration import Parameter

DEFAULT = "default"


class ConfigBuilder(Mapping[str, Any]):
    """What rules read and change. As a mapping it holds the value of every parameter."""

    def __init__(self, parameters: Mapping[str, Parameter], entries: Mapping[str, Entry], verb: str) -> None:
        self.verb = verb
        self.problems: list[Problem] = []
        self.messages: list[str] = []
        self.broken: set[str] = set()  # parameters with a problem; rules leave them alone
        self.origins: dict[str, str] = dict.fromkeys(parameters, DEFAULT)
        self._parameters = parameters
        self._entries = entries
        self._defaults: dict[str, Any] = {name: declared.default for name, declared in parameters.items()}
        self._values = dict(self._defaults)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def location(self, name: str) -> SourceLocation | None:
        """Where the user wrote the parameter; None for a default."""
        entry = self._entries.get(name)
        return entry.location if entry else None

    def is_set(self, name: str) -> bool:
        """Whether the user wrote the parameter, directly or by an alias."""
        return name in self._entries

    def differs(self, name: str) -> bool:
        """Whether the user gave the parameter a value other than its default."""
        return self.is_set(name) and self._values[name] != self._defaults[name]

    def take(self, name: str, value: Any) -> None:
        """The value that the user wrote, read and checked."""
        location = self.location(name)
        assert location is not None
        self._values[name] = value
        self.origins[name] = location.origin

    def derive(self, name: str, value: Any, reason: str) -> None:
        """A default that follows from other parameters; it gives way to what the user wrote."""
        self._defaults[name] = value
        if not self.is_set(name):
            self._values[name] = value
            self.origins[name] = f"{DEFAULT} {reason}" if reason else DEFAULT

    def set_silently(self, name: str, value: Any) -> None:
        """Another form of the same value."""
        self._values[name] = value

    def change(self, name: str, value: Any, because: str) -> None:
        """Give the parameter another value, which is told if the user had set it."""
        before = self._values[name]
        if before == value:
            return
        self._values[name] = value
        if self.is_set(name):
            self.messages.append(f"changed {name} {_python(before)} -> {_python(value)} because {because}")

    def no_effect(self, name: str, why: str) -> None:
        """Tell that what the user set changes nothing."""
        self.messages.append(f"`{name}` ({self.origins[name]}) has no effect {why}")

    def problem(self, name: str, what: str, write: str = "") -> None:
        """Something is wrong with the parameter; what to write instead."""
        self.broken.add(name)
        location = self.location(name)
        written = f"`{name}` (from `{location.alias}`)" if location and location.alias else f"`{name}`"
        text = f"{written}: {what}"
        self.problems.append(Problem(f"{text}; {write}" if write else text, location))

    def missing(self, name: str) -> None:
        """A parameter that has no default was not written."""
        example = format_value(self._parameters[name].example)
        self.problem(name, "is required and not set", f"write `{name}: {example}`, with your own value")


def _python(value: Any) -> str:
    """True and False read better than true and false in a sentence about a change."""
    return str(value) if isinstance(value, bool) else format_value(value)

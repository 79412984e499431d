"""Declare parameters: each one once, with all that typing, checking, documentation and editors need.

A section is a frozen dataclass whose fields are made with `parameter(...)`; `section(...)` binds it to its title, its
aliases and the rules that concern several parameters. No code here depends on a particular parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from erniekit.config.parse import Entry, Problem, SourceLocation
from erniekit.config.stages import ALL_STAGES, STAGES, Stage
from erniekit.config.values import BY_ANNOTATION, ValueType, format_value, read_none

Scalar = bool | int | float | str | None
# The devices on which a parameter takes effect.
CPU_AND_GPU, CPU_ONLY, GPU_ONLY, NOT_IMPLEMENTED = ("CPU", "GPU"), ("CPU",), ("GPU",), ()


@dataclass(frozen=True)
class When:
    """A condition on one parameter: it has one of `values`, or is greater than `above`, or is true.

    With neither `values` nor `above` every true value meets the condition.
    """

    name: str
    values: tuple[Scalar, ...] = ()
    above: float | None = None

    def holds(self, values: Mapping[str, Any]) -> bool:
        value = values[self.name]
        if self.above is not None:
            return bool(value > self.above)
        if not self.values:
            return bool(value)
        if isinstance(value, (list, tuple)):
            return any(word in self.values for word in value)
        return value in self.values

    def __str__(self) -> str:
        if self.above is not None:
            return f"`{self.name}` above {format_value(self.above)}"
        wanted = " or ".join(format_value(value) for value in self.values) if self.values else "true"
        return f"`{self.name}` {wanted}"


def when(name: str, *values: Scalar, above: float | None = None) -> When:
    """Return a condition on the parameter `name`.

    Examples: `when("lora")`, `when("lr_scheduler_type", "cosine", "wsd")`, `when("pipeline_parallel_degree", above=1)`.
    """
    return When(name, values, above)


@dataclass(frozen=True)
class Derived:
    """A default that follows from other parameters.

    Attributes:
        text: the documentation shows this text instead of a value.
        value: maps the configuration so far to the default and to the reason that its origin adds ("" for none).
        neutral: the placeholder until the default is computed.
    """

    text: str
    value: Callable[[ConfigBuilder], tuple[Any, str]]
    neutral: Any


@dataclass(frozen=True)
class Parameter:
    """One declared parameter; see `parameter` for the meaning of the fields."""

    default: Any
    meaning: str
    name: str = ""
    section: str = ""
    kind: ValueType = BY_ANNOTATION["str"]
    nullable: bool = False
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    spellings: Mapping[str, Any] = field(default_factory=dict)
    unit: str = ""
    verbs: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    needs: tuple[When, ...] = ()
    excludes: tuple[str, ...] = ()
    required_for: tuple[str, ...] = ()
    derived: Derived | None = None
    devices: tuple[str, ...] = CPU_AND_GPU
    stands_for: tuple[str, ...] = ()
    wrong_type: str = ""
    example: Any = None

    def read(self, raw: Any) -> Any:
        """Return the normalised form of the value that the user wrote, or `raw` itself if it cannot be read."""
        if raw is None and self.default in ("", (), "none"):  # an empty line means the empty default
            raw = "none" if self.default == "none" else ""
        if self.nullable:
            raw = read_none(raw)
        if raw is False and "no" in self.choices:
            raw = "no"  # YAML 1.1 reads an unquoted `no` as false
        if isinstance(raw, str):
            raw = self._spelled(raw)
        value = self.kind.read(raw)
        if isinstance(value, list):
            if len(value) == 1 and isinstance(value[0], str) and isinstance(words := self._spelled(value[0]), list):
                return words  # a word for a whole list, such as `none`, written as a YAML list of one word
            return [self._canonical(item) for item in value]
        return self._canonical(value)

    def _spelled(self, word: str) -> Any:
        return self.spellings.get(word.strip().casefold(), word)

    def _canonical(self, value: Any) -> Any:
        if not isinstance(value, str) or not (self.choices or self.spellings):
            return value
        spelled = self._spelled(value)
        if isinstance(spelled, str):
            return next((choice for choice in self.choices if choice.casefold() == spelled.strip().casefold()), spelled)
        return value

    @property
    def takes_effect(self) -> str:
        """The devices on which it takes effect: `CPU and GPU`, `CPU`, `GPU`, or `nowhere yet`."""
        return " and ".join(self.devices) or "nowhere yet"

    @property
    def default_text(self) -> str:
        return self.derived.text if self.derived else format_value(self.default)


def parameter(
    default: Any,
    meaning: str,
    *,
    kind: ValueType | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
    spellings: Mapping[str, Any] | None = None,
    unit: str = "",
    verbs: tuple[str, ...] = (),
    stages: tuple[str, ...] = (),
    needs: When | tuple[When, ...] = (),
    excludes: tuple[str, ...] = (),
    required_for: tuple[str, ...] = (),
    devices: tuple[str, ...] = CPU_AND_GPU,
    stands_for: tuple[str, ...] = (),
    wrong_type: str = "",
    example: Any = None,
) -> Any:
    """Declare one field of a section.

    Args:
        default: the value when the user writes none, or a `Derived` default.
        meaning: one paragraph for users: what the parameter does and when to change it.
        kind: how users write the value; by default it follows from the annotation bool, int, float or str.
        minimum, maximum, above, below: bounds of the value or of each item; the last two exclude the bound.
        choices: the allowed values, or the allowed items of a list.
        spellings: other ways of writing a choice, in lower case -> the choice.
        unit: the unit of the value, for the documentation.
        verbs, stages: where the parameter has an effect; by default those of the section.
        needs: the parameter has an effect if one of these conditions holds; otherwise a message reports that it has
            none.
        excludes: parameters that must not be true (or set) together with this one.
        required_for: verbs that cannot run without a value.
        devices: the devices on which it takes effect. `GPU_ONLY`: a value other than the default has no effect on a
            CPU, and a message says so; `CPU_ONLY` the other way round. `NOT_IMPLEMENTED`: none of its verbs exists, and
            every other verb reports it.
        stands_for: the parameters that it sets, if no code reads the parameter itself.
        wrong_type: an explanation for the message about a value of the wrong type.
        example: the value that the documentation shows; by default the default.
    """
    derived = default if isinstance(default, Derived) else None
    value = derived.neutral if derived else default
    declared = Parameter(
        default=value,
        meaning=meaning,
        kind=kind or BY_ANNOTATION["str"],
        minimum=minimum,
        maximum=maximum,
        above=above,
        below=below,
        choices=choices,
        spellings=spellings or {},
        unit=unit,
        verbs=verbs,
        stages=stages,
        needs=(needs,) if isinstance(needs, When) else needs,
        excludes=excludes,
        required_for=required_for,
        derived=derived,
        devices=devices,
        stands_for=stands_for,
        wrong_type=wrong_type,
        example=example,
    )
    return dataclasses.field(default=value, metadata={"parameter": declared, "kind": kind})


@dataclass(frozen=True)
class Alias:
    """A name that users write for other parameters. Loading expands it and reports this; the program never sees it.

    Attributes:
        target: the parameter it renames, or "" when it expands.
        expands: value in lower case -> the parameters that it sets.
        choices: the values in the spelling of the documentation.
    """

    name: str
    meaning: str
    target: str = ""
    expands: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    choices: tuple[str, ...] = ()


def renamed(name: str, target: str, meaning: str) -> Alias:
    """Declare another name of one parameter."""
    return Alias(name, meaning, target=target)


def shorthand(name: str, meaning: str, expands: Mapping[str, Mapping[str, Any]]) -> Alias:
    """Declare a name whose values expand to several parameters."""
    folded = {word.casefold(): dict(values) for word, values in expands.items()}
    return Alias(name, meaning, expands=folded, choices=tuple(expands))


@dataclass(frozen=True)
class Rule:
    """A check of several parameters. It runs in `stages` and for `verbs` only (none named: for every verb), and only if
    all of `names` have valid values."""

    names: tuple[str, ...]
    check: Callable[[ConfigBuilder], None]
    stages: tuple[str, ...] = ALL_STAGES
    verbs: tuple[str, ...] = ()

    def applies(self, builder: ConfigBuilder) -> bool:
        """Return whether the stage and the verb have this rule and all parameters that it reads are valid."""
        if self.verbs and builder.verb not in self.verbs:
            return False
        return builder["stage"] in self.stages and not builder.broken.intersection(self.names)

    @property
    def text(self) -> str:
        """The text of the rule in the documentation: the docstring of the function."""
        return " ".join((self.check.__doc__ or "").split())


def rule(
    *names: str, stages: tuple[str, ...] = ALL_STAGES, verbs: tuple[str, ...] = ()
) -> Callable[[Callable[[ConfigBuilder], None]], Rule]:
    """Return a decorator that makes a function of a `ConfigBuilder` the rule over `names` in some or all stages.

    Args:
        verbs: the verbs that it is for; by default all. A rule that only tells something of training names `train`.
    """
    if stages != ALL_STAGES:
        names = (*names, "stage")
    return lambda check: Rule(names, check, stages, verbs)


@dataclass(frozen=True)
class Section:
    """A page of the parameter reference: one dataclass of parameters with its aliases and rules."""

    key: str
    title: str
    summary: str
    dataclass: type
    parameters: tuple[Parameter, ...]
    aliases: tuple[Alias, ...]
    rules: tuple[Rule, ...]

    @property
    def names(self) -> list[str]:
        """The names of its parameters and aliases."""
        return [item.name for item in self.parameters] + [alias.name for alias in self.aliases]


def section(
    dataclass_: type,
    *,
    key: str,
    title: str,
    verbs: tuple[str, ...],
    stages: tuple[str, ...] = ALL_STAGES,
    aliases: tuple[Alias, ...] = (),
    rules: tuple[Rule, ...] = (),
) -> Section:
    """Build a section from the fields of a dataclass; `verbs` and `stages` apply to parameters that name none."""
    parameters = []
    for item in dataclasses.fields(dataclass_):
        declared: Parameter = item.metadata["parameter"]
        annotation, _, null = str(item.type).partition(" | ")
        kind = item.metadata["kind"] or BY_ANNOTATION[annotation]
        parameters.append(
            dataclasses.replace(
                declared,
                name=item.name,
                section=key,
                kind=kind,
                nullable=null == "None",
                verbs=declared.verbs or verbs,
                stages=declared.stages or stages,
            )
        )
    summary = " ".join((dataclass_.__doc__ or "").split())
    return Section(key, title, summary, dataclass_, tuple(parameters), aliases, rules)


# A configuration while it is being resolved: values, their origins, and the problems and messages so far.

DEFAULT = "default"


class ConfigBuilder(Mapping[str, Any]):
    """A configuration that rules read and change. As a mapping it has the value of every parameter."""

    def __init__(self, parameters: Mapping[str, Parameter], entries: Mapping[str, Entry], verb: str) -> None:
        self.verb = verb
        self.problems: list[Problem] = []
        self.messages: list[str] = []
        self.broken: set[str] = set()  # parameters with a problem; rules skip them
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

    @property
    def stage(self) -> Stage:
        """The training stage of the configuration."""
        return STAGES[self._values["stage"]]

    def location(self, name: str) -> SourceLocation | None:
        """Return where the user wrote the parameter; None for a default."""
        entry = self._entries.get(name)
        return entry.location if entry else None

    def is_set(self, name: str) -> bool:
        """Return whether the user wrote the parameter, directly or by an alias."""
        return name in self._entries

    def differs(self, name: str) -> bool:
        """Return whether the user gave the parameter a value other than its default."""
        return self.is_set(name) and self._values[name] != self._defaults[name]

    def take(self, name: str, value: Any) -> None:
        """Set the parameter to the value that the user wrote, after it was read and checked."""
        location = self.location(name)
        assert location is not None
        self._values[name] = value
        self.origins[name] = location.origin

    def derive(self, name: str, value: Any, reason: str) -> None:
        """Set a default that follows from other parameters; a value that the user wrote takes precedence."""
        self._defaults[name] = value
        if not self.is_set(name):
            self._values[name] = value
            self.origins[name] = f"{DEFAULT} {reason}" if reason else DEFAULT

    def set_silently(self, name: str, value: Any) -> None:
        """Set another form of the same value without a message."""
        self._values[name] = value

    def change(self, name: str, value: Any, because: str) -> None:
        """Give the parameter another value, and report this if the user had set it."""
        before = self._values[name]
        if before == value:
            return
        self._values[name] = value
        if self.is_set(name):
            self.messages.append(f"changed {name} {_python(before)} -> {_python(value)} because {because}")

    def no_effect(self, name: str, why: str) -> None:
        """Report that the value which the user set has no effect."""
        self.messages.append(f"`{name}` ({self.origins[name]}) has no effect {why}")

    def problem(self, name: str, what: str, write: str = "") -> None:
        """Report a problem with the parameter, and the text to write instead."""
        self.broken.add(name)
        location = self.location(name)
        written = f"`{name}` (from `{location.alias}`)" if location and location.alias else f"`{name}`"
        text = f"{written}: {what}"
        self.problems.append(Problem(f"{text}; {write}" if write else text, location, name))

    def missing(self, name: str) -> None:
        """Report that a required parameter is not set."""
        example = format_value(self._parameters[name].example)
        self.problem(name, "is required and not set", f"write `{name}: {example}`, with your own value")


def _python(value: Any) -> str:
    """Format a value for a message about a change, with booleans as True and False."""
    return str(value) if isinstance(value, bool) else format_value(value)

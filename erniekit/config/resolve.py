"""Resolve entries to a complete configuration: expand aliases, read values, derive defaults, apply rules.

Every step adds its problems to the `ConfigBuilder` and none stops the others, so that the user sees all at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from erniekit.config.foreign import FOREIGN_NAMES, translate
from erniekit.config.json_schema import structural_problems
from erniekit.config.object_urls import is_url, url_problem
from erniekit.config.parameter import Alias, ConfigBuilder, Parameter
from erniekit.config.parse import Entry, Problem, SourceLocation
from erniekit.config.registry import ALIASES, PARAMETERS, RULES, did_you_mean, unmet_needs
from erniekit.config.values import format_value, path_problem
from erniekit.redaction import redacted


def resolve(layers: Iterable[list[Entry]], verb: str) -> ConfigBuilder:
    """Resolve the configuration of `verb` from layers of entries; a later layer overrides an earlier one."""
    entries: dict[str, Entry] = {}
    problems: list[Problem] = []
    expansions: dict[str, str] = {}
    notes: dict[str, str] = {}
    for layer in layers:
        for name, entry in _expand_aliases(layer, problems, expansions, notes).items():
            entries.pop(name, None)  # a later layer's entry also comes later in the order
            entries[name] = entry
    builder = ConfigBuilder(PARAMETERS, entries, verb)
    builder.problems.extend(problems)
    used = {entry.location.alias for entry in entries.values()}
    builder.messages.extend(message for alias, message in expansions.items() if alias in used)
    builder.messages.extend(notes.values())
    _read_values(builder, entries)
    _check_required(builder)
    _derive_defaults(builder)
    for rule in RULES:
        if rule.applies(builder):
            rule.check(builder)
    _refuse_excluded(builder)
    for name in entries:
        if name in PARAMETERS and name not in builder.broken:
            _report_without_effect(builder, PARAMETERS[name])
    return builder


def _expand_aliases(
    layer: list[Entry], problems: list[Problem], expansions: dict[str, str], notes: dict[str, str]
) -> dict[str, Entry]:
    """Replace aliases and the names of other suites by the parameters that they stand for.

    Args:
        expansions: alias -> the message about it, which is told if the values are not overridden; added to.
        notes: other suites' names without effect, and words added to lists -> the message; added to.
    """
    plain = {entry.name: entry for entry in layer if entry.name not in ALIASES and entry.name not in FOREIGN_NAMES}
    for entry in layer:
        if entry.name in plain:
            continue
        expanded, text = _expand(ALIASES[entry.name], entry) if entry.name in ALIASES else _translate(entry)
        if expanded is None:
            problems.append(Problem(text, entry.location, entry.name))
            continue
        location = SourceLocation(entry.location.file, entry.location.line, alias=entry.name)
        lists = {name for name in expanded if PARAMETERS[name].kind.is_list}
        if text:
            (notes if lists or not expanded else expansions)[entry.name] = text
        for name, value in expanded.items():
            other = plain.get(name)
            if other is None:
                plain[name] = Entry(name, value, location, entry.text if value is entry.value else None)
            elif name in lists:
                words = PARAMETERS[name].read(other.value)
                if isinstance(words, list) and value not in words:
                    plain[name] = Entry(name, [*words, value], other.location)
            elif PARAMETERS[name].read(other.value) != PARAMETERS[name].read(value):
                text = (
                    f"`{entry.name}` expands to {name}: {format_value(value)}, "
                    f"but `{name}` is {format_value(other.value)} "
                    f"({other.location.origin}); remove one of the two"
                )
                problems.append(Problem(text, entry.location, entry.name))
    return plain


def _expand(alias: Alias, entry: Entry) -> tuple[Mapping[str, Any] | None, str]:
    """Return the parameters that an alias stands for with the message about it, or None with the problem."""
    word = entry.value.strip().casefold() if isinstance(entry.value, str) else ""
    if not alias.target and word not in alias.expands:
        hint = did_you_mean(entry.value, alias.choices) if isinstance(entry.value, str) else ""
        return None, f"`{alias.name}`: expected {', '.join(alias.choices)}, got {format_value(entry.value)}{hint}"
    expanded = {alias.target: entry.value} if alias.target else alias.expands[word]
    meaning = ", ".join(f"{name}: {format_value(value)}" for name, value in expanded.items())
    return expanded, f"`{alias.name}: {format_value(entry.value)}` ({entry.location.origin}) expands to {meaning}"


def _translate(entry: Entry) -> tuple[Mapping[str, Any] | None, str]:
    """Return the same for a name of another suite."""
    translation = translate(entry)
    return translation.parameters, translation.text


def _read_values(builder: ConfigBuilder, entries: dict[str, Entry]) -> None:
    values = {name: _read(entry) for name, entry in entries.items()}
    for name, what in structural_problems(values):
        builder.problem(name, what)
    for name, value in values.items():
        if name not in builder.broken:
            builder.take(name, tuple(value) if isinstance(value, list) else value)
            if PARAMETERS[name].kind.names_path:
                _check_paths(builder, name)
            _report_spelling(builder, PARAMETERS[name], entries[name].value)


def _check_paths(builder: ConfigBuilder, name: str) -> None:
    """Report values of which no path can be made, so that no code that opens one need ask again."""
    value = builder[name]
    for path in value if isinstance(value, tuple) else (value,):
        if is_url(path):
            problem = url_problem(path)
            if not problem and not PARAMETERS[name].kind.takes_url:
                problem = "is a URL, and this has to be a path of this machine"
        else:
            problem = path_problem(path) if isinstance(path, str) else ""
        if problem:
            builder.problem(name, f"{format_value(redacted(path))} {problem}")
            return


def _read(entry: Entry) -> Any:
    parameter = PARAMETERS.get(entry.name)
    if parameter is None:
        return entry.value
    return parameter.read(entry.text if parameter.kind.is_text and entry.text is not None else entry.value)


def _report_spelling(builder: ConfigBuilder, parameter: Parameter, raw: Any) -> None:
    meant = parameter.spellings.get(raw.strip().casefold()) if isinstance(raw, str) else None
    if isinstance(meant, str) and (raw.strip() or meant != "none"):
        written = f"`{parameter.name}: {format_value(raw)}` ({builder.origins[parameter.name]})"
        builder.messages.append(f"{written} is read as {format_value(meant)}")


def _check_required(builder: ConfigBuilder) -> None:
    for name, parameter in PARAMETERS.items():
        if builder.verb in parameter.required_for and name not in builder.broken and not builder[name]:
            builder.missing(name)


def _derive_defaults(builder: ConfigBuilder) -> None:
    for name, parameter in PARAMETERS.items():
        if parameter.derived:
            builder.derive(name, *parameter.derived.value(builder))


def _refuse_excluded(builder: ConfigBuilder) -> None:
    for name, parameter in PARAMETERS.items():
        for other in parameter.excludes:
            if name < other and builder[name] and builder[other] and not {name, other} & builder.broken:
                origins = f"`{name}` ({builder.origins[name]}) and `{other}` ({builder.origins[other]})"
                builder.problem(name, f"{origins} exclude each other", "keep one of them")


def _report_without_effect(builder: ConfigBuilder, parameter: Parameter) -> None:
    """Report a value that the user set if it has no effect."""
    name = parameter.name
    if not builder.differs(name):
        return
    if not _effective_verbs(builder, name) & set(parameter.verbs):
        builder.no_effect(name, f"with `erniekit {builder.verb}`; it applies to {', '.join(parameter.verbs)}")
    elif _has_stage(builder, name) and builder["stage"] not in parameter.stages and "stage" not in builder.broken:
        builder.no_effect(name, f"with stage {builder['stage']}")
    elif unmet := unmet_needs(parameter, builder):
        reasons = dict.fromkeys(f"{need.name} is {format_value(builder[need.name])}" for need in unmet)
        wanted = dict.fromkeys(str(need) for need in unmet)
        builder.no_effect(name, f"because {' and '.join(reasons)}; it needs {' or '.join(wanted)}")


def _has_stage(builder: ConfigBuilder, name: str) -> bool:
    """Return whether `name` may apply to a verb that has a stage; `erniekit codes`, for one, has none."""
    return bool(_effective_verbs(builder, name) & set(PARAMETERS["stage"].verbs))


def _effective_verbs(builder: ConfigBuilder, name: str) -> set[str]:
    """Return the verbs that `name` may apply to; `preview` and `export` also read configurations of training."""
    if builder.verb == "export" and builder.origins[name] != "command line":
        return {"export", "train"}
    return {"train"} if builder.verb == "preview" else {builder.verb}

"""From entries to a finished draft: aliases are expanded, values read and checked, defaults derived, rules applied.

Every step adds its problems to the draft; none stops the others, so that the user sees all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from erniekit.parameters.declaration import Alias, Parameter
from erniekit.parameters.draft import Draft
from erniekit.parameters.entries import Entry, Place, Problem
from erniekit.parameters.json_schema import structural_problems
from erniekit.parameters.schema import ALIASES, PARAMETERS, RULES, did_you_mean, unmet_needs
from erniekit.parameters.values import shown


def resolve(layers: Iterable[list[Entry]], verb: str) -> Draft:
    """Work out the configuration of `verb` from layers of entries; a later layer overrides an earlier one."""
    entries: dict[str, Entry] = {}
    problems: list[Problem] = []
    expansions: dict[str, str] = {}
    for layer in layers:
        for name, entry in _expand_aliases(layer, problems, expansions).items():
            entries.pop(name, None)  # a later layer's entry also comes later in the order
            entries[name] = entry
    draft = Draft(PARAMETERS, entries, verb)
    draft.problems.extend(problems)
    used = {entry.place.alias for entry in entries.values()}
    draft.messages.extend(message for alias, message in expansions.items() if alias in used)
    _read_values(draft, entries)
    _check_required(draft)
    _derive_defaults(draft)
    for rule in RULES:
        if not draft.broken.intersection(rule.names):
            rule.check(draft)
    _refuse_excluded(draft)
    for name in entries:
        if name in PARAMETERS and name not in draft.broken:
            _report_without_effect(draft, PARAMETERS[name])
    return draft


def _expand_aliases(layer: list[Entry], problems: list[Problem], expansions: dict[str, str]) -> dict[str, Entry]:
    plain = {entry.name: entry for entry in layer if entry.name not in ALIASES}
    for entry in layer:
        if entry.name not in ALIASES:
            continue
        alias = ALIASES[entry.name]
        expanded = _expand(alias, entry)
        if expanded is None:
            hint = did_you_mean(entry.value, alias.choices) if isinstance(entry.value, str) else ""
            text = f"`{alias.name}`: expected {', '.join(alias.choices)}, got {shown(entry.value)}{hint}"
            problems.append(Problem(text, entry.place))
            continue
        place = Place(entry.place.file, entry.place.line, alias=alias.name)
        for name, value in expanded.items():
            other = plain.get(name)
            if other is None:
                plain[name] = Entry(name, value, place, entry.text if alias.target else None)
            elif PARAMETERS[name].read(other.value) != PARAMETERS[name].read(value):
                text = (
                    f"`{alias.name}` stands for {name}: {shown(value)}, but `{name}` is {shown(other.value)} "
                    f"({other.place.origin}); remove one of the two"
                )
                problems.append(Problem(text, entry.place))
        meaning = ", ".join(f"{name}: {shown(value)}" for name, value in expanded.items())
        expansions[alias.name] = f"`{alias.name}: {shown(entry.value)}` ({entry.place.origin}) stands for {meaning}"
    return plain


def _expand(alias: Alias, entry: Entry) -> dict[str, Any] | None:
    if alias.target:
        return {alias.target: entry.value}
    word = entry.value.strip().casefold() if isinstance(entry.value, str) else ""
    return dict(alias.expands[word]) if word in alias.expands else None


def _read_values(draft: Draft, entries: dict[str, Entry]) -> None:
    values = {name: _read(entry) for name, entry in entries.items()}
    for name, what in structural_problems(values):
        draft.problem(name, what)
    for name, value in values.items():
        if name not in draft.broken:
            draft.take(name, tuple(value) if isinstance(value, list) else value)
            _tell_spelling(draft, PARAMETERS[name], entries[name].value)


def _read(entry: Entry) -> Any:
    parameter = PARAMETERS.get(entry.name)
    if parameter is None:
        return entry.value
    return parameter.read(entry.text if parameter.kind.is_text and entry.text is not None else entry.value)


def _tell_spelling(draft: Draft, parameter: Parameter, raw: Any) -> None:
    meant = parameter.spellings.get(raw.strip().casefold()) if isinstance(raw, str) and raw.strip() else None
    if isinstance(meant, str):
        draft.messages.append(f"`{parameter.name}: {raw}` ({draft.origins[parameter.name]}) is read as {meant}")


def _check_required(draft: Draft) -> None:
    for name, parameter in PARAMETERS.items():
        if draft.verb in parameter.required_for and name not in draft.broken and not draft[name]:
            draft.missing(name)


def _derive_defaults(draft: Draft) -> None:
    for name, parameter in PARAMETERS.items():
        if parameter.derived:
            draft.derive(name, *parameter.derived.value(draft))


def _refuse_excluded(draft: Draft) -> None:
    for name, parameter in PARAMETERS.items():
        for other in parameter.excludes:
            if name < other and draft[name] and draft[other] and not {name, other} & draft.broken:
                origins = f"`{name}` ({draft.origins[name]}) and `{other}` ({draft.origins[other]})"
                draft.problem(name, f"{origins} exclude each other", "keep one of them")


def _report_without_effect(draft: Draft, parameter: Parameter) -> None:
    """A value that the user set either has its effect, or is reported to have none."""
    name = parameter.name
    if not draft.differs(name):
        return
    if not _serves(draft, name) & set(parameter.verbs):
        draft.no_effect(name, f"with `erniekit {draft.verb}`; it serves {', '.join(parameter.verbs)}")
    elif draft["stage"] not in parameter.stages and "stage" not in draft.broken:
        draft.no_effect(name, f"with stage {draft['stage']}")
    elif unmet := unmet_needs(parameter, draft):
        reasons = dict.fromkeys(f"{need.name} is {shown(draft[need.name])}" for need in unmet)
        wanted = dict.fromkeys(str(need) for need in unmet)
        draft.no_effect(name, f"because {' and '.join(reasons)}; it needs {' or '.join(wanted)}")


def _serves(draft: Draft, name: str) -> set[str]:
    """`preview` and `export` are given training configurations, so what only training uses is no surprise there."""
    if draft.verb == "export" and draft.origins[name] != "command line":
        return {"export", "train"}
    return {"train"} if draft.verb == "preview" else {draft.verb}

"""Build two JSON Schemas (draft 2020-12) from the declarations of parameters.

The exact schema checks values after they have been read. The schema for editors also accepts all forms that users
write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from erniekit.config.foreign import FOREIGN_NAMES
from erniekit.config.foreign_names import ForeignName
from erniekit.config.parameter import Alias, Parameter
from erniekit.config.registry import ALIASES, PARAMETERS, did_you_mean
from erniekit.config.values import format_value

MOST_HINTS = 100  # on unknown names
DRAFT = "https://json-schema.org/draft/2020-12/schema"
SCHEMA_ID = "erniekit.schema.json"
MARK = "Written by `erniekit docs`"  # `erniekit docs` may replace or remove files that start with it
GENERATED_BY = f"{MARK} from erniekit/config/sections/."


def value_schema(parameter: Parameter) -> dict[str, Any]:
    """Return the schema of the normalised value of a parameter."""
    schema: dict[str, Any] = dict(parameter.kind.schema)
    target = schema
    if parameter.kind.is_list:
        target = schema["items"] = dict(schema["items"])
    bounds = {
        "minimum": parameter.minimum,
        "maximum": parameter.maximum,
        "exclusiveMinimum": parameter.above,
        "exclusiveMaximum": parameter.below,
    }
    target.update({keyword: bound for keyword, bound in bounds.items() if bound is not None})
    if parameter.choices:
        target["enum"] = list(parameter.choices)
    if parameter.nullable:
        schema["type"] = [schema["type"], "null"]
    return schema


def exact_schema() -> dict[str, Any]:
    """Return the schema of a configuration whose values have been read; every parameter is optional here."""
    return {
        "$schema": DRAFT,
        "type": "object",
        "properties": {name: value_schema(parameter) for name, parameter in PARAMETERS.items()},
        "additionalProperties": False,
    }


def editor_schema() -> dict[str, Any]:
    """Return the schema for YAML editors: descriptions, aliases, and every accepted form of a value."""
    properties = {name: _written_schema(parameter) for name, parameter in PARAMETERS.items()}
    properties |= {name: _alias_schema(alias) for name, alias in ALIASES.items()}
    properties |= {name: _foreign_schema(foreign) for name, foreign in FOREIGN_NAMES.items() if foreign.read}
    return {
        "$schema": DRAFT,
        "$id": SCHEMA_ID,
        "$comment": GENERATED_BY,
        "title": "ERNIEKit configuration",
        "type": "object",
        "properties": dict(sorted(properties.items())),
        "additionalProperties": False,
    }


def _written_schema(parameter: Parameter) -> dict[str, Any]:
    forms: list[Mapping[str, Any]] = [value_schema(parameter), *parameter.kind.written]
    if parameter.spellings:
        words = {"enum": sorted({*parameter.choices, *parameter.spellings})}
        forms.append({"type": "array", "items": words} if parameter.kind.is_list else words)
    if "no" in parameter.choices:
        forms.append({"const": False})
    described: dict[str, Any] = {"description": parameter.meaning}
    if parameter.derived is None and not parameter.required_for:
        described["default"] = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
    return described | (dict(forms[0]) if len(forms) == 1 else {"anyOf": [dict(form) for form in forms]})


def _alias_schema(alias: Alias) -> dict[str, Any]:
    described = {"description": alias.meaning, "deprecated": bool(alias.target)}
    if alias.target:
        return _written_schema(PARAMETERS[alias.target]) | described
    return described | {"enum": sorted({*alias.choices, *alias.expands})}


def _foreign_schema(foreign: ForeignName) -> dict[str, Any]:
    """Return the schema of a name of another suite that is read; its values are checked when they are translated."""
    meaning = f"It is read as `{foreign.word}`" if foreign.word else foreign.why
    return {"description": f"A name of {' and '.join(foreign.suites)}. {meaning}".strip(), "deprecated": True}


def structural_problems(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Check read values against the exact schema; yield (name, problem and correction)."""
    from jsonschema import Draft202012Validator  # takes 80 ms, which `--help` avoids

    validator = Draft202012Validator(exact_schema())
    seen: set[str] = set()
    for error in sorted(validator.iter_errors(dict(values)), key=lambda error: [str(step) for step in error.path]):
        if error.validator == "additionalProperties":
            unknown = [name for name in values if name not in PARAMETERS]
            for number, name in enumerate(unknown):  # a hint takes milliseconds, and a file may be no configuration
                hint = did_you_mean(name, (*PARAMETERS, *ALIASES)) if number < MOST_HINTS else ""
                yield name, f"unknown parameter{hint}"
            continue
        name = str(error.path[0])
        if name not in seen:  # report only the first problem of a value
            seen.add(name)
            yield name, _explain(PARAMETERS[name], error.instance, str(error.validator), error.validator_value)


def _explain(parameter: Parameter, value: Any, keyword: str, bound: Any) -> str:
    got = f"got {format_value(value)}"
    if keyword == "enum":
        hint = did_you_mean(value, parameter.choices) if isinstance(value, str) else ""
        return f"expected {_one_of(parameter.choices)}, {got}{hint}"
    if keyword in _BOUNDS:
        unit = f" ({parameter.unit})" if parameter.unit else ""
        return f"must be {_BOUNDS[keyword]} {format_value(bound)}{unit}, {got}"
    if keyword == "uniqueItems":
        return f"contains the same item twice, {got}"
    if value is None or value == "":
        default = parameter.default_text
        return f"has no value; write {parameter.kind.expected}, or remove the line for the default {default}"
    if isinstance(value, str) and value.strip().lower() in _QUOTED and "true or false" in parameter.kind.expected:
        return f'expected {parameter.kind.expected}, got the string "{value}"; remove the quotes'
    extra = f": {parameter.wrong_type}" if parameter.wrong_type else ""
    return f"expected {parameter.kind.expected}, {got}{extra}"


_QUOTED = ("true", "false")  # strings by which the user meant a boolean
_BOUNDS = {
    "minimum": "at least",
    "maximum": "at most",
    "exclusiveMinimum": "greater than",
    "exclusiveMaximum": "less than",
}


def _one_of(choices: tuple[str, ...]) -> str:
    return choices[0] if len(choices) == 1 else ", ".join(choices[:-1]) + " or " + choices[-1]

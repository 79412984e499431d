"""Read the values that users write.

A `ValueType` converts a value of a YAML file, a JSON file or the command line to the JSON value that the generated
JSON Schema describes (`2 ** 15` becomes 32768, `"a.jsonl, b.jsonl"` a list). A reader never raises: it returns a value
that it cannot read unchanged, and the schema then refuses it with the parameter's name and location.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_POWER = re.compile(r"\s*(-?\d{1,6})\s*\*\*\s*(\d{1,2})\s*")
_NONE_WORDS = {"none", "null", "~"}


@dataclass(frozen=True)
class ValueType:
    """The type of a parameter: how users write its value, and the schema of the normalised value.

    Attributes:
        title: the name of the type in the documentation.
        expected: the phrase of an error message after "expected".
        read: user-written value -> normalised JSON value, or the value itself if it cannot be read.
        schema: JSON Schema of the normalised value, without bounds and choices.
        written: JSON Schemas of the other forms that a file may contain, for editors.
    """

    title: str
    expected: str
    read: Callable[[Any], Any]
    schema: Mapping[str, Any]
    written: tuple[Mapping[str, Any], ...] = field(default=())

    @property
    def is_list(self) -> bool:
        return self.schema.get("type") == "array"

    @property
    def is_text(self) -> bool:
        return self.schema.get("type") == "string"


def read_integer(raw: Any) -> Any:
    """Read an integer: 8, "8", 8.0, "1e4" and "2 ** 15" are integers; 8.5 and true are not."""
    if isinstance(raw, str):
        power = _POWER.fullmatch(raw)
        if power:
            return int(power[1]) ** int(power[2])
        number = read_number(raw)
        return read_integer(number) if isinstance(number, float) else raw
    if isinstance(raw, float) and math.isfinite(raw) and raw.is_integer():
        return int(raw)
    return raw


def read_number(raw: Any) -> Any:
    """Read a number: 1, "1e-5" (a string in YAML 1.1) or "2 ** 3"; nan and inf become strings, which schemas refuse."""
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str):
        power = _POWER.fullmatch(raw)
        text = str(int(power[1]) ** int(power[2])) if power else raw.strip()
        try:
            number = float(text)
        except ValueError:
            return raw
    elif isinstance(raw, (int, float)):
        try:
            number = float(raw)
        except OverflowError:
            return "a number that is too large"
    else:
        return raw
    return number if math.isfinite(number) else str(number)


def _as_it_is(raw: Any) -> Any:
    return raw


def _read_words(raw: Any) -> Any:
    if isinstance(raw, str):
        return re.split(r"\s*,\s*|\s+", raw.strip()) if raw.strip() else []
    return raw


def _split_at_commas(raw: Any) -> Any:
    if isinstance(raw, str):
        return [part.strip() for part in raw.split(",")] if raw.strip() else []
    return raw


def _read_numbers(raw: Any) -> Any:
    parts = [raw] if isinstance(raw, (int, float)) and not isinstance(raw, bool) else _split_at_commas(raw)
    return [read_number(part) for part in parts] if isinstance(parts, list) else parts


def _read_segments(raw: Any) -> Any:
    if isinstance(raw, str):
        text = raw.strip()
        if text.startswith("[") and text.endswith("]"):
            return [read_integer(part.strip()) for part in text[1:-1].split(",")]
        return text
    return [read_integer(part) for part in raw] if isinstance(raw, list) else raw


def read_none(raw: Any) -> Any:
    """Read the words that users write for null; return any other value unchanged."""
    return None if isinstance(raw, str) and raw.strip().lower() in _NONE_WORDS else raw


_INTEGER_TEXT = {"type": "string", "pattern": r"^\s*-?\d+\s*(\*\*\s*\d+\s*)?$"}
_NUMBER_TEXT = {"type": "string", "pattern": r"^\s*([-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|-?\d+\s*\*\*\s*\d+)\s*$"}

# Excludes quoted or Python-spelled booleans and null, which are not names of folders.
_NO_WORD = r"^(?!\s*([Tt]rue|TRUE|[Ff]alse|FALSE|[Nn]one|NONE|[Nn]ull|NULL|~)\s*$)"

BOOLEAN = ValueType("boolean", "true or false", _as_it_is, {"type": "boolean"})
INTEGER = ValueType("integer", "an integer", read_integer, {"type": "integer"}, (_INTEGER_TEXT,))
FLAG = ValueType(
    "integer (0 or 1)",
    "0 or 1",
    lambda raw: int(raw) if isinstance(raw, bool) else read_integer(raw),
    {"type": "integer", "minimum": 0, "maximum": 1},
    ({"type": "boolean"},),
)
LARGEST_NUMBER = 1e12  # of any rate or factor; more is a slip, and would overflow in float32 products
NUMBER = ValueType(
    "number", "a finite number", read_number, {"type": "number", "maximum": LARGEST_NUMBER}, (_NUMBER_TEXT,)
)
TEXT = ValueType("string", "a string (put numbers and dates in quotes)", _as_it_is, {"type": "string"})
WORDS = ValueType(
    "list of words",
    "words, either a YAML list or one string with spaces or commas between them",
    _read_words,
    {"type": "array", "items": {"type": "string", "minLength": 1}, "uniqueItems": True},
    ({"type": "string"},),
)
TEXTS = ValueType(
    "comma-separated list",
    "one or more strings, either comma-separated or a YAML list",
    _split_at_commas,
    {"type": "array", "items": {"type": "string", "minLength": 1}},
    ({"type": "string"},),
)
NUMBERS = ValueType(
    "comma-separated list of numbers",
    "one or more finite numbers, either comma-separated or a YAML list",
    _read_numbers,
    {"type": "array", "items": {"type": "number"}, "minItems": 1},
    ({"type": "string"}, {"type": "number"}, {"type": "array", "items": _NUMBER_TEXT}),
)
SEGMENTS = ValueType(
    "string or list of integers",
    "`uniform`, `layer:ClassName` or a list of layer indices such as [0, 29, 57]",
    _read_segments,
    {
        "anyOf": [
            {"type": "string", "pattern": r"^(uniform|layer:\S+)$"},
            {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        ]
    },
    ({"type": "string", "pattern": r"^\s*\[[\d\s,]+\]\s*$"},),
)
PATH_OR_BOOLEAN = ValueType(
    "path or boolean",
    "a folder, true or false",
    _as_it_is,
    {"anyOf": [{"type": "boolean"}, {"type": "string", "minLength": 1, "pattern": _NO_WORD}]},
)
DEVICE = ValueType(
    "string",
    "`auto`, `cpu`, `gpu` or `gpu:N` with the number of a GPU",
    lambda raw: raw.strip().lower() if isinstance(raw, str) else raw,
    {"type": "string", "pattern": r"^(auto|cpu|gpu(:\d+)?)$"},
)

BY_ANNOTATION: Mapping[str, ValueType] = {"bool": BOOLEAN, "int": INTEGER, "float": NUMBER, "str": TEXT}


def format_value(value: Any) -> str:
    """Format a value as YAML on one line; texts of more than 120 characters are truncated."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        text = "[" + ", ".join(format_value(item) for item in value) + "]"
    elif isinstance(value, str):
        text = value if value and value == value.strip() and "\n" not in value else repr(value)
    else:
        text = str(value) if not isinstance(value, int) or abs(value) < 10**40 else "an integer of many digits"
    return text if len(text) <= 120 else text[:117] + "..."

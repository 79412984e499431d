"""Read the values that users write.

A `ValueType` converts a value of a YAML file, a JSON file or the command line to the JSON value that the generated
JSON Schema describes (`2 ** 15` becomes 32768, `"a.jsonl, b.jsonl"` a list). A reader never raises: it returns a value
that it cannot read unchanged, and the schema then refuses it with the parameter's name and location.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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
        names_path: whether its strings name files or folders, see `path_problem`.
        takes_url: whether such a name may also be a URL of an object store.
    """

    title: str
    expected: str
    read: Callable[[Any], Any]
    schema: Mapping[str, Any]
    written: tuple[Mapping[str, Any], ...] = field(default=())
    names_path: bool = False
    takes_url: bool = False

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
        if power and raw.isascii():
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
        if not raw.isascii():  # Python also reads the digits of other scripts
            return raw
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


def read_boolean(raw: Any) -> Any:
    """Read a boolean: true and false, or 1 and 0 as other suites write them; a quoted word stays a string."""
    return bool(raw) if isinstance(raw, int) and raw in (0, 1) else raw


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


def _in_parts(raw: Any) -> Any:
    return [raw] if isinstance(raw, (int, float)) and not isinstance(raw, bool) else _split_at_commas(raw)


def _read_numbers(raw: Any) -> Any:
    parts = _in_parts(raw)
    return [read_number(part) for part in parts] if isinstance(parts, list) else parts


def _read_integers(raw: Any) -> Any:
    parts = _in_parts(raw)
    return [read_integer(part) for part in parts] if isinstance(parts, list) else parts


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

BOOLEAN = ValueType("boolean", "true or false", read_boolean, {"type": "boolean"}, ({"enum": [0, 1]},))
LARGEST_INTEGER = 10**12  # of anything that is counted here; more is a slip, and would overflow later
INTEGER = ValueType(
    "integer", "an integer", read_integer, {"type": "integer", "maximum": LARGEST_INTEGER}, (_INTEGER_TEXT,)
)
FLAG = ValueType(
    "integer (0 or 1)",
    "0 or 1",
    lambda raw: int(raw) if isinstance(raw, bool) else read_integer(raw),
    {"type": "integer", "minimum": 0, "maximum": 1},
    ({"type": "boolean"},),
)
LARGEST_NUMBER = 1e12  # of any rate or factor; more is a slip, and would overflow in float32 products
_NUMBER_SCHEMA = {"type": "number", "maximum": LARGEST_NUMBER}
NUMBER = ValueType("number", "a finite number", read_number, _NUMBER_SCHEMA, (_NUMBER_TEXT,))


def _read_epochs(raw: Any) -> Any:
    number = read_number(raw)
    return int(number) if isinstance(number, float) and number.is_integer() else number


EPOCHS = ValueType("number", "a finite number", _read_epochs, _NUMBER_SCHEMA, (_NUMBER_TEXT,))
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
OPTIONAL_NUMBERS = replace(
    NUMBERS,
    expected="finite numbers, either comma-separated or a YAML list",
    schema={"type": "array", "items": {"type": "number"}},
)
INTEGERS = ValueType(
    "comma-separated list of integers",
    "integers, either comma-separated or a YAML list",
    _read_integers,
    {"type": "array", "items": {"type": "integer", "maximum": LARGEST_INTEGER}, "uniqueItems": True},
    ({"type": "string"}, {"type": "integer"}, {"type": "array", "items": _INTEGER_TEXT}),
)
REPEATABLE_WORDS = replace(WORDS, schema={"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1})
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
    names_path=True,
    takes_url=True,
)
PATH = replace(TEXT, names_path=True)
PATH_OR_URL = replace(PATH, takes_url=True)
PATHS_OR_URLS = replace(TEXTS, names_path=True, takes_url=True)
# The names under which other builds of PaddlePaddle and its plug-ins know accelerators.
OTHER_DEVICES = ("xpu", "npu", "iluvatar_gpu", "metax_gpu", "mlu", "gcu", "intel_hpu", "sdaa", "musa")
DEVICE = ValueType(
    "string",
    f"`auto`, `cpu`, `gpu`, one of Paddle's other devices ({', '.join(OTHER_DEVICES)}), or one of several: `gpu:N`",
    lambda raw: raw.strip().lower() if isinstance(raw, str) else raw,
    {"type": "string", "pattern": rf"^(auto|cpu|(gpu|{'|'.join(OTHER_DEVICES)})(:\d+)?)$"},
)

LONGEST_PATH, LONGEST_NAME = 4095, 255  # bytes; the limits of Linux


def path_problem(path: str) -> str:
    """Return why no file can have this path, which may begin with `~`; "" if one can. The disk is not looked at."""
    try:
        expanded = os.fsencode(os.path.expanduser(path))
    except UnicodeEncodeError:
        return "is not text that a file system can store"
    home = path.partition("/")[0]
    if home.startswith("~") and expanded == os.fsencode(path):
        return f"begins with {home}, and there is no such user; write the whole path"
    if b"\0" in expanded:
        return "contains a NUL character"
    if len(expanded) > LONGEST_PATH:
        return f"is {len(expanded):,} bytes long, and a path has at most {LONGEST_PATH:,}"
    if longest := max((len(name) for name in expanded.split(b"/") if len(name) > LONGEST_NAME), default=0):
        return f"contains a name of {longest:,} bytes, and a file's name has at most {LONGEST_NAME}"
    return ""


def other_device(device: str) -> str:
    """Return the kind of a device that is neither a CPU nor a GPU ("npu" of "npu:1"), or ""."""
    kind = device.partition(":")[0]
    return kind if kind in OTHER_DEVICES else ""


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

"""Read values of a codec's `config.json` and name those that no codec has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from erniekit.errors import ModelFileError

LARGEST = 2**31 - 1  # of the numbers that describe a codec; what is computed of them then has a finite float
LONGEST = 32  # list of such numbers, of which products are taken


def config_reader(path: Path, config: Mapping[str, Any]) -> Callable[[str, Any], Any]:
    """Return a function that reads a value of a codec's `config.json`, of the type that its default has.

    It takes the key and the default, which stands for an absent key and for null. A list of numbers is given as a
    tuple. It raises ModelFileError if the value has another type, or is a number beyond `LARGEST`; a number above 0 is
    asked for where the default is.
    """

    def read(key: str, default: Any) -> Any:
        value = config.get(key)
        if value is None:
            return default
        if isinstance(default, tuple):
            kind = type(default[0])
            is_list = isinstance(value, list) and 1 <= len(value) <= LONGEST
            if is_list and all(_is(item, kind) and 0 < item <= LARGEST for item in value):
                return tuple(kind(item) for item in value)
            raise ModelFileError(f"{path}: {key}: expected a list of numbers above 0, got {value!r:.80}")
        if not _is(value, type(default)):
            raise ModelFileError(f"{path}: {key}: expected a value such as {default!r}, got {value!r:.80}")
        if isinstance(value, (int, float)) and not abs(value) <= LARGEST:
            raise ModelFileError(f"{path}: {key}: expected a number such as {default!r}, got {value!r:.80}")
        if isinstance(default, (int, float)) and not isinstance(default, bool) and default > 0 and value <= 0:
            raise ModelFileError(f"{path}: {key}: expected a number above 0, got {value!r}")
        return type(default)(value)

    return read


def check_epsilon(path: Path, key: str, epsilon: float) -> None:
    """Raise ModelFileError if the least variance of a layer norm is larger than Paddle's layer norm takes."""
    if not 0 < epsilon <= 1e-3:
        raise ModelFileError(f"{path}: {key}: expected a number above 0 and up to 0.001, got {epsilon}")


def _is(value: Any, kind: type) -> bool:
    """Return whether a value of JSON is of a kind; an int is a float, too, and a bool is no number."""
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return isinstance(value, (int, float) if kind is float else kind)

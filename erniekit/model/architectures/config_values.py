"""Check single values of `config.json`. Needs neither Paddle nor NumPy."""

from __future__ import annotations

import math
from typing import Any

from erniekit.model.architectures.architecture import Key
from erniekit.model.architectures.config_keys import shown

POSITIVE = 1.2e-38  # of float32: the smallest that "positive" lets through, for numbers that need not be whole
_LARGEST = {int: 2**31 - 1, float: 3.4e38}


def own_value(name: str, key: Key, values: dict[str, Any], problems: list[str]) -> Any:
    """Return the value of a key that only some architectures have, or its default; problems as of `checked_value`."""
    if key.nullable and values.get(name, key) is None:
        return None
    value = checked_value(name, key, values.get(name), problems)
    return key.default if value is None else value


def checked_value(name: str, key: Key, value: Any, problems: list[str]) -> Any:
    """Return the value of a key, or None where it is absent or what is wrong with it was added to `problems`."""
    if value is None:
        if key.required:
            problems.append(f"{name}: missing")
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    most = _LARGEST.get(key.kind) if key.most is None else key.most
    if is_number and most is not None and value > most:
        limit = f"{most:,}" if isinstance(most, int) else f"{most:g}"
        problems.append(f"{name}: must be at most {limit}, got {str(value)[:20]}")
        return None
    if key.kind is float and is_number:
        value = float(value)
    if not isinstance(value, key.kind) or (key.kind is not bool and isinstance(value, bool)):
        problems.append(f"{name}: expected {key.kind.__name__}, got {shown(value)}")
        return None
    if is_number and _is_below(value, key.minimum):
        wanted = "positive" if key.minimum in (1, POSITIVE) else f"at least {key.minimum:g}"
        problems.append(f"{name}: must be {wanted}, got {shown(value)}")
        return None
    if isinstance(value, float) and math.isnan(value):
        problems.append(f"{name}: expected a number, got {shown(value)}")
        return None
    return value


def _is_below(value: Any, minimum: float | None) -> bool:
    return minimum is not None and not value >= minimum  # so that not-a-number is refused as well

"""Read the fields of a request's body: each is known, of its type and within its bounds, or the request is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from erniekit.serving.errors import RefusedError

# Fields that clients send and that say nothing about the answer; every other unknown field is refused.
WITHOUT_EFFECT = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"})
_REQUIRED = object()


def body_of(content: bytes) -> Fields:
    """Return the fields of a JSON body.

    Raises:
        RefusedError: it is not a JSON object.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RefusedError("the body is not a JSON object", code="invalid_json")
    return Fields(value)


class Fields:
    """The fields of an object, each of which is taken once; `end` refuses those that nobody took."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}  # null: left out
        self._taken: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """Return a field as it is."""
        self._taken.add(name)
        return self._values.get(name, default)

    def has(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        return self._typed(name, str, "a text", default)

    def flag(self, name: str, default: bool = False) -> bool:
        return self._typed(name, bool, "true or false", default)

    def whole(self, name: str, default: Any, *, least: int, most: int = 2**53) -> Any:
        """Return an integer within bounds, or the default."""
        value = self._typed(name, int, "a whole number", default)
        return self._within(name, value, least, most)

    def number(self, name: str, default: float, *, least: float, most: float, above: bool = False) -> float:
        """Return a number within bounds, or the default.

        Args:
            above: the number is larger than `least`.
        """
        value = self._typed(name, (int, float), "a number", default)
        if above and value == least:
            raise RefusedError(f"{name}: expected a number above {least:g}, got {value:g}", param=name)
        return self._within(name, value, least, most)

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        value = self.text(name, default)
        if value not in choices:
            raise RefusedError(f"{name}: expected one of {', '.join(choices)}, got {value[:80]!r}", param=name)
        return value

    def words(self, name: str, *, most: int) -> tuple[str, ...]:
        """Return a text or a list of texts, none of them empty."""
        value = self.take(name, [])
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(word, str) and word for word in value):
            raise RefusedError(f"{name}: expected a text, or a list of texts that are not empty", param=name)
        if len(value) > most:
            raise RefusedError(f"{name}: expected {most} texts at most, got {len(value):,}", param=name)
        return tuple(value)

    def end(self) -> None:
        """Raise RefusedError if a field is left that nobody knows."""
        unknown = sorted(self._values.keys() - self._taken - WITHOUT_EFFECT)
        if unknown:
            raise RefusedError(
                f"{unknown[0][:80]}: this server does not know the field, or does not offer what it asks for",
                param=unknown[0][:80],
                code="unknown_field",
            )

    def _typed(self, name: str, kind: Any, expected: str, default: Any) -> Any:
        value = self.take(name, default)
        if value is _REQUIRED:
            raise RefusedError(f"{name}: is missing", param=name, code="missing_field")
        if value is default:
            return value
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise RefusedError(f"{name}: expected {expected}, got {json.dumps(value)[:80]}", param=name)
        return value

    def _within(self, name: str, value: Any, least: float, most: float) -> Any:
        if value is not None and not (math.isfinite(value) and least <= value <= most):
            raise RefusedError(f"{name}: expected a number from {least:g} to {most:g}, got {value:g}", param=name)
        return value

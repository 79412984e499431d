"""Score one answer by a rule: exact match, the same number, a pattern, JSON of a schema, a length.

Each rule takes texts and gives a float from 0 to 1. This module also runs in a process of its own, so it imports
neither Paddle nor NumPy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

THOUGHTS_END = "</think>"
_MOST_DIGITS = 400  # of a number in an answer; more is a model that repeats itself
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_SIGN = r"(?:(?<![\w.)])[-+\u2212])?"
_NUMBER = re.compile(
    rf"({_SIGN})(?:\\d?frac\{{(\d+)\}}\{{(\d+)\}}|({_DIGITS})(?:[eE]([-+]?\d{{1,3}})(?!\w))?(?:\s*/\s*(\d+))?)"
)
_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)\n?```", re.DOTALL | re.IGNORECASE)


def after_thoughts(text: str) -> str:
    """Return what an answer says after its thoughts, without white space at both ends."""
    return text.rpartition(THOUGHTS_END)[2].strip()


def exact_match(text: str, reference: str | Sequence[str]) -> float:
    """Return 1 if an answer, after its thoughts, is the reference or one of several; else 0.

    White space at both ends does not count. It is `eval_exact_match` of one answer.
    """
    references = [reference] if isinstance(reference, str) else reference
    answer = after_thoughts(text)
    return float(any(answer == after_thoughts(each) for each in references))


def numeric(text: str, reference: str | Sequence[str], tolerance: float = 0.0) -> float:
    """Return 1 if an answer ends in the number of the reference or of one of several; else 0.

    The number of a text stands in its last `\\boxed{}`, or behind its last `####`, else it is the text's last number.
    Numbers are compared as fractions: 0.5, 1/2 and \\frac{1}{2} are the same.

    Args:
        tolerance: the largest relative error.

    Raises:
        ValueError: the reference has no number.
    """
    references = [reference] if isinstance(reference, str) else reference
    found = number_of(after_thoughts(text))
    for each in references:
        wanted = number_of(after_thoughts(each))
        if wanted is None:
            raise ValueError(f"there is no number in the reference answer {each[:60]!r}")
        if found is not None and abs(found - wanted) <= Fraction(tolerance) * abs(wanted):
            return 1.0
    return 0.0


def regex(text: str, pattern: re.Pattern[str]) -> float:
    """Return 1 if the pattern is found in an answer, thoughts included; else 0."""
    return float(pattern.search(text) is not None)


def json_schema(text: str, validator: Any) -> float:
    """Return 1 if an answer, after its thoughts, is JSON that a validator of `jsonschema` accepts; else 0.

    The answer is one JSON value, alone or as the only block between ``` marks.
    """
    answer = after_thoughts(text)
    blocks = _FENCE.findall(answer)
    try:
        value = json.loads(blocks[0] if len(blocks) == 1 else answer, parse_constant=_refuse_constant)
        return float(validator.is_valid(value))
    except (ValueError, RecursionError):
        return 0.0


def length(text: str, fewest: int, most: int) -> float:
    """Return 1 for an answer of `fewest` to `most` characters, and less the further its length L is from that.

    A shorter answer gets L / fewest, a longer one 2 - L / most, at least 0. White space at both ends does not count.
    """
    characters = len(text.strip())
    if characters < fewest:
        return characters / fewest
    return max(0.0, min(1.0, 2.0 - characters / most))


def number_of(text: str) -> Fraction | None:
    """Return the number that a text ends in (see `numeric`), or None if it has none."""
    boxed = _last_boxed(text)
    if boxed is not None:
        text = boxed
    elif "####" in text:
        text = text.rpartition("####")[2]
    last: Fraction | None = None
    for match in _NUMBER.finditer(text):
        number = _number(match)
        last = number if number is not None else last
    return last


def _number(match: re.Match[str]) -> Fraction | None:
    sign, numerator, denominator, digits, exponent, divisor = match.groups()
    if max(len(part or "") for part in match.groups()) > _MOST_DIGITS:
        return None
    if numerator is not None:
        size = Fraction(int(numerator), int(denominator)) if int(denominator) else None
    else:
        size = Fraction(digits.replace(",", "")) * Fraction(10) ** int(exponent or 0)
        if divisor is not None:
            size = size / int(divisor) if int(divisor) else None
    return size if size is None or sign in ("", "+") else -size


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place]
    return None


def _refuse_constant(word: str) -> Any:
    raise ValueError(word)  # NaN and Infinity are no JSON


def schema_validator(schema: Mapping[str, Any] | bool) -> Any:
    """Return a validator of the draft that a JSON schema names, else of 2020-12; it fetches no schema from elsewhere.

    Raises:
        ValueError: it is no JSON schema; the text says why.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY

    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(error.message) from None
    return kind(schema, registry=REGISTRY)  # without one, jsonschema downloads what a `$ref` names

"""Find the reference answer of a data record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Fields of records for learning by rewards, as data sets for trl, ms-swift and verl have them; the first one counts.
REFERENCE_FIELDS = ("reference", "answer", "solution", "ground_truth", "reward_model.ground_truth")
_ANSWER_FIELDS = ("completion", "tgt", "output")
_ANSWERERS = ("assistant", "gpt", "bot", "model")


def reference_of(record: Mapping[str, Any], field: str = "") -> str | list[str]:
    """Return the reference answer of a data record, or several of which each is right.

    Args:
        record: the record as it stands in its file.
        field: the field that has it, with dots into objects; "" for the first of `REFERENCE_FIELDS`, else the last
            answer of the dialogue.

    Raises:
        ValueError: the record has none; the text says what was looked for.
    """
    if field:
        value = _at(record, field)
        if value is None:
            there = ", ".join(map(str, record)) or "nothing"
            raise ValueError(f"the record has no field `{field}` (it has {there})")
        return _as_texts(value, field)
    for name in REFERENCE_FIELDS:
        value = _at(record, name)
        if value is not None:
            return _as_texts(value, name)
    answer = _last_answer(record)
    if answer is None:
        raise ValueError(f"the record has no reference answer: neither {', '.join(REFERENCE_FIELDS)}, nor an answer")
    return answer


def _at(record: Mapping[str, Any], path: str) -> Any:
    if path in record:
        return record[path]
    value: Any = record
    for step in path.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _as_texts(value: Any, field: str) -> str | list[str]:
    items = value if isinstance(value, (list, tuple)) else [value]
    if not items or any(isinstance(item, (Mapping, list, tuple)) or item is None for item in items):
        raise ValueError(f"`{field}` of the record is neither a text, a number nor a list of these")
    texts = [_text(item) for item in items]
    return texts if isinstance(value, (list, tuple)) else texts[0]


def _text(item: Any) -> str:
    return ("true" if item else "false") if isinstance(item, bool) else str(item)


def _last_answer(record: Mapping[str, Any]) -> str | None:
    for name, role, content in (("messages", "role", "content"), ("conversations", "from", "value")):
        turns = record.get(name)
        if isinstance(turns, Sequence) and not isinstance(turns, str) and turns:
            return _content(turns[-1], role, content)
    for name in _ANSWER_FIELDS:
        value = record.get(name)
        last = value[-1] if isinstance(value, (list, tuple)) and value else value
        if isinstance(last, str):
            return last
        if isinstance(last, Mapping):
            return _content(last, "role", "content")
    return None


def _content(turn: Any, role: str, content: str) -> str | None:
    if not isinstance(turn, Mapping):
        return None
    speaker = turn.get(role, turn.get("role"))
    text = turn.get(content, turn.get("content"))
    return text if speaker in _ANSWERERS and isinstance(text, str) else None

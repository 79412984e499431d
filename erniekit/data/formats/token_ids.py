"""Read samples that were tokenised elsewhere: ids, and labels that say which of them are targets.

A text file has a sample on each line, `ids` or `ids|labels`; JSON has the fields `input_ids` and `labels`. Labels stand
beside the ids that they repeat, and are not shifted: -100 where an id is no target. A line without labels is a document
for pre-training, or a pack of several, each of which begins with the BOS token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from erniekit.data.formats.problems import MalformedError, RecordProblem, describe_value, shorten
from erniekit.data.units import TokenIds

TOKEN_IDS = "token_ids"
FIELDS = ("input_ids", "text")  # of JSON, and of the lines of a text file
LABELS = "labels"
UNTRAINED = -100
SEPARATOR = "|"
_IDS = re.compile(r"\s*\d{1,9}(?:\s+\d{1,9})*\s*", re.ASCII)
_LABELS = re.compile(r"\s*-?\d{1,9}(?:\s+-?\d{1,9})*\s*", re.ASCII)
_NUMBER = {"input_ids": re.compile(r"\d{1,9}", re.ASCII), LABELS: re.compile(r"-?\d{1,9}", re.ASCII)}
_FEWEST = 8  # ids by which a record is judged
_EXPECTED = {
    "input_ids": "token ids, whole numbers from 0 with spaces between them",
    LABELS: f"labels, each the id beside it or {UNTRAINED}",
}

Item = TypeVar("Item")


def is_token_ids(record: dict) -> bool:
    """Return whether a record holds ids: a list of them, or a line of `ids|labels`.

    A line of ids alone could be a text of numbers, so its type has to be written.
    """
    ids, text = record.get("input_ids"), record.get("text")
    if isinstance(ids, list):
        return text is None and bool(ids) and all(isinstance(number, int) for number in ids[:_FEWEST])
    if record.keys() != {"text"} or not isinstance(text, str) or text.count(" ") < _FEWEST or SEPARATOR not in text:
        return False
    try:
        parse_token_ids(record)
    except MalformedError:
        return False
    return True


def begins_with_id(record: dict) -> bool:
    """Return whether a record is a line that begins as one of ids does."""
    text = record.get("text")
    return record.keys() == {"text"} and isinstance(text, str) and text.lstrip()[:1].isdecimal()


def is_line_of_ids(record: dict) -> bool:
    """Return whether a record is a line of many whole numbers, which may be ids or a text."""
    text = record.get("text")
    many = record.keys() == {"text"} and isinstance(text, str) and text.count(" ") >= _FEWEST
    return many and _IDS.fullmatch(str(text)) is not None


def parse_token_ids(record: dict) -> TokenIds:
    """Return the sample of a record.

    Raises:
        MalformedError: something is no id, or labels are not as many as ids, or differ from the ids beside them.
    """
    values = record.get("input_ids")
    labels = record.get(LABELS)
    if values is None and isinstance(record.get("text"), str):
        values, separator, labels = record["text"].partition(SEPARATOR)
        if not separator:
            labels = None
        elif SEPARATOR in labels:
            raise MalformedError(LABELS, f"one {SEPARATOR!r} between ids and labels", "more than one")
    ids = _numbers(values, "input_ids")
    if labels is None:
        return TokenIds(ids, (True,) * len(ids), packed=True)
    targets = _numbers(labels, LABELS)
    if len(targets) != len(ids):
        raise MalformedError(LABELS, f"as many labels as ids ({len(ids):,})", f"{len(targets):,}")
    for place, (number, label) in enumerate(zip(ids, targets, strict=True)):
        if label not in (number, UNTRAINED):
            shifted = targets[:-1] == ids[1:] or (place + 1 < len(ids) and label == ids[place + 1])
            why = " (labels stand beside the ids that they repeat; these are shifted)" if shifted else ""
            raise MalformedError(f"{LABELS}[{place}]", f"the id {number} or {UNTRAINED}", f"{label}{why}")
    return TokenIds(ids, tuple(label != UNTRAINED for label in targets))


def _numbers(value: object, name: str) -> tuple[int, ...]:
    if isinstance(value, str):
        if not (_IDS if name == "input_ids" else _LABELS).fullmatch(value):
            wrong = next((word for word in value.split() if not _NUMBER[name].fullmatch(word)), "")
            raise MalformedError(name, _EXPECTED[name], shorten(wrong) if wrong else "nothing")
        return tuple(map(int, value.split()))
    if not isinstance(value, Sequence) or not value:
        raise MalformedError(name, _EXPECTED[name], "nothing" if value == [] else describe_value(value))
    smallest = 0 if name == "input_ids" else UNTRAINED
    for place, number in enumerate(value):
        if isinstance(number, bool) or not isinstance(number, int) or not smallest <= number < 10**9:
            raise MalformedError(f"{name}[{place}]", _EXPECTED[name], shorten(number))
    return tuple(value)


def with_empty_lines(path: str | Path, items: Iterator[tuple[int, Item] | RecordProblem]) -> Iterator:
    """Yield the lines of a text file, and a problem for each empty one between two others, where one is missing."""
    last = 0
    for item in items:
        line = item.line if isinstance(item, RecordProblem) else item[0]
        for empty in range(last + 1, line):
            yield RecordProblem(str(path), empty, "input_ids", _EXPECTED["input_ids"], "an empty line")
        yield item
        last = max(last, line)

"""Parse recordings as units with the times of their words, which stand in the record or in a file of an aligner."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from erniekit.data.formats.alignments import SUFFIXES, check_order, read_alignment, suffix_of
from erniekit.data.formats.asr import parse_seconds
from erniekit.data.formats.format import Record
from erniekit.data.formats.media_paths import find_file
from erniekit.data.formats.problems import MalformedError, describe_value, parse_text, shorten
from erniekit.data.units import AlignedUnits, AlignedWord

WORD_FIELDS = ("word", "text")  # of an item of `words`
WORDS = ("words", "alignment")  # in the record or in a file
FIELDS = frozenset({"units", *WORDS, "tier", "recording", "duration", "units_per_second"})
MAX_DIFFERENCE_S = 0.1  # between the durations of a record and of its alignment
MAX_UNIT = 1 << 31
_UNIT = re.compile(r"\d{1,10}", re.ASCII)
_EXPECTED_UNITS = "a list of whole numbers from 0, or a text of them with spaces between"


def is_aligned_record(record: dict) -> bool:
    """Return whether a record has units and the times of words."""
    return record.get("units") is not None and any(record.get(name) is not None for name in WORDS)


def parse_aligned_units(record: dict) -> AlignedUnits:
    """Return the units and words of a record; those of a file follow in `with_alignment`."""
    units = parse_units(record.get("units"), "units")
    duration, rate = (
        None if record.get(name) is None else parse_seconds(record[name], name)
        for name in ("duration", "units_per_second")
    )
    for name, value in (("duration", duration), ("units_per_second", rate)):
        if value == 0:
            raise MalformedError(name, "a number above 0", shorten(record[name]))
    named = record.get("alignment") is not None
    if named and record.get("words") is not None:
        raise MalformedError("alignment", "words in the record or in a file", "both")
    if not named:
        for name in ("tier", "recording"):
            if record.get(name) is not None:
                raise MalformedError(name, "an `alignment` that it belongs to", "none")
    words = () if named else _parse_words(record.get("words"))
    if not units:
        raise MalformedError("units", "the units of the recording", "none, for words that are said in it")
    return AlignedUnits(units, words, duration, rate)


def parse_units(value: object, name: str) -> tuple[int, ...]:
    """Return the units that a record has as a list of numbers, or as a text of numbers with spaces between.

    Raises:
        MalformedError: one is no whole number, or negative.
    """
    numbers: list = value.split() if isinstance(value, str) else value if isinstance(value, list) else None  # type: ignore[assignment]
    if numbers is None:
        raise MalformedError(name, _EXPECTED_UNITS, describe_value(value))
    if isinstance(value, str):
        numbers = [int(text) if _UNIT.fullmatch(text) else text for text in numbers]
    if numbers and set(map(type, numbers)) == {int} and min(numbers) >= 0 and max(numbers) < MAX_UNIT:
        return tuple(numbers)
    for position, unit in enumerate(numbers):
        if type(unit) is not int or not 0 <= unit < MAX_UNIT:  # True is an int, too
            raise MalformedError(f"{name}[{position}]", "a unit: a whole number from 0", shorten(unit))
    return tuple(numbers)


def _parse_words(value: object) -> tuple[AlignedWord, ...]:
    expected = 'a list of {"word": ..., "start": seconds, "end": seconds}'
    if not isinstance(value, list):
        raise MalformedError("words", f"{expected}, or an `alignment`", describe_value(value))
    words = []
    for number, item in enumerate(value):
        name = f"words[{number}]"
        if not isinstance(item, dict):
            raise MalformedError(name, "an object with word, start and end", shorten(item))
        field = next((field for field in WORD_FIELDS if item.get(field) is not None), WORD_FIELDS[0])
        text = parse_text(item.get(field), f"{name}.{field}")
        start, end = (parse_seconds(item.get(field), f"{name}.{field}") for field in ("start", "end"))
        words.append(AlignedWord(text, start, end))
    checked = check_order(words, [f"words[{number}]" for number in range(len(words))], "words")
    if not checked:
        raise MalformedError("words", "the words that are said", "none, for units of speech")
    return checked


def with_alignment(record: Record, value: dict, folders: Sequence[str]) -> Record:
    """Return a parsed record with the words of the file that it names.

    Args:
        value: what the record was parsed from.
        folders: below which the file must lie; see `media_paths.media_folders`.

    Raises:
        MalformedError: there is no such file, or it has no words that could be used.
    """
    if not isinstance(record, AlignedUnits) or value.get("alignment") is None:
        return record
    name, tier, recording = (
        parse_text(value[field], field) if value.get(field) is not None else ""
        for field in ("alignment", "tier", "recording")
    )
    suffix = suffix_of(name)
    if not suffix:
        raise MalformedError("alignment", f"a file that ends in {' or '.join(SUFFIXES)}", shorten(name, 100))
    unused = ("recording", recording) if suffix == ".textgrid" else ("tier", tier)
    if unused[1]:
        raise MalformedError(unused[0], f"none beside a file that ends in {suffix}", shorten(unused[1]))
    path, reason = find_file(name, folders, "alignments")
    if not path:
        expected = f"a file below {' or '.join(folders)}"
        raise MalformedError("alignment", expected, f"{shorten(name, 100)}: {reason}")
    words, duration = read_alignment(path, tier, recording)
    if duration is not None and abs((record.duration or duration) - duration) > MAX_DIFFERENCE_S:
        assert record.duration is not None
        expected = f"{duration:g} s, at which the words of {name} end"
        raise MalformedError("duration", expected, f"{record.duration:g}")
    return replace(record, words=words, duration=duration or record.duration, alignment=path)

"""Parse recordings that are codes already, with what is said in them: lines of JSON, or shards beside which they lie.

The codes of a line are its own. Those of a shard stay where they are: a record has their place in the tar file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from erniekit.data.formats.aligned_units import parse_units
from erniekit.data.formats.asr import OWN_RECORDING_FIELDS, RECORDING_FIELDS, STRETCH_FIELDS, parse_seconds
from erniekit.data.formats.problems import MalformedError, RecordProblem, describe_value, parse_text, shorten
from erniekit.data.formats.unused_fields import UnusedFields
from erniekit.data.media.code_shard_reader import ShardProblem, read_shard, shards_of
from erniekit.data.media.code_shards import SUFFIX, CodedRecording, Shard
from erniekit.data.media.codes_folder import UNITS
from erniekit.data.units import SpokenText

CODES_FIELDS = ("codes", "units")  # of all levels, or of the only one
LANGUAGE_FIELDS = ("language", "language_id")
DURATION_FIELDS = ("audio_duration", "duration")
FIELDS = frozenset(
    {
        *CODES_FIELDS, *LANGUAGE_FIELDS, *DURATION_FIELDS, "id", "text", "text_pinyin", "instruct", "num_tokens",
        "units_per_second", "speaker", "similar", "clean_start_token_idx",
        *RECORDING_FIELDS, *STRETCH_FIELDS,  # of which `erniekit codes` made the codes
    }
)  # fmt: skip
MAX_CODE = (1 << 16) - 1
SHARD_SUFFIXES = (".lst", ".tar")
_EXPECTED = "lists of whole numbers from 0, one list of the same length for each level"


def is_shards(path: str | Path) -> bool:
    """Return whether a path names shards: a folder, an index, or a tar file."""
    path = Path(path)
    return path.suffix.lower() in SHARD_SUFFIXES or path.is_dir()


def shards_at(path: str | Path) -> list[Shard]:
    """Return the shards of a folder, an index or a tar file, without lines of an index that name none."""
    return [shard for shard in shards_of(Path(path)) if isinstance(shard, Shard)]


def is_codes_record(record: dict) -> bool:
    """Return whether a record has codes and what is said in them."""
    if record.get("words") is not None or record.get("alignment") is not None:
        return False
    return any(record.get(name) is not None for name in CODES_FIELDS) and isinstance(record.get("text"), str)


def parse_codes(record: dict) -> SpokenText:
    """Return a record with its own codes.

    Raises:
        MalformedError: they are none, or a field of the record does not fit them.
    """
    name = next((name for name in CODES_FIELDS if record.get(name) is not None), None)
    if name is None:
        recording = next((name for name in OWN_RECORDING_FIELDS if record.get(name) is not None), None)
        got = "nothing" if recording is None else f"{recording}: run `erniekit codes` on these recordings first"
        raise MalformedError("codes", "codes of the recording", got)
    codes = _levels(record["codes"]) if name == "codes" else _one_level(record["units"])
    frames = codes.shape[1]
    if record.get("num_tokens") not in (None, frames):
        raise MalformedError("num_tokens", f"{frames:,}, the frames of the codes", shorten(record["num_tokens"]))
    return _spoken(record, SpokenText("", codes, None, int(codes.max())))


def read_shards_of_codes(path: str | Path, unused: UnusedFields | None = None) -> Iterator[
    tuple[int, SpokenText] | RecordProblem
]:  # fmt: skip
    """Yield (line, record) for each recording of shards, in the order of the tar files, and what is wrong with them.

    A line is that of the shard's JSONL file, `place.file` the number of the shard in `shards_at`. The records of one
    shard are in memory, and the codes of one recording.
    """
    first: dict[str, Path] = {}
    number = -1
    for shard in shards_of(Path(path)):
        if isinstance(shard, ShardProblem):
            yield _problem(shard, None)
            continue
        number += 1
        for item in read_shard(shard):
            if isinstance(item, ShardProblem):
                yield _problem(item, shard)
                continue
            try:
                if item.key in first:
                    got = f"{item.key!r}, as {first[item.key]} has"
                    raise MalformedError("id", "a name that no other shard has", got)
                record = _coded(item, number)
            except MalformedError as error:
                place = str(shard.records), item.line
                yield RecordProblem(*place, error.field, error.expected, error.got, error.effect)
                continue
            first[item.key] = shard.records
            if unused is not None:
                unused.add(item.line, item.record)
            yield item.line, record


def _coded(item: CodedRecording, number: int) -> SpokenText:
    """Return a recording of the shard with this number as a record."""
    if item.place is None:
        raise MalformedError(item.key + SUFFIX, "numbers with their lowest byte first", "others")
    digest = hashlib.blake2b(np.ascontiguousarray(item.codes, "<i4").tobytes(), digest_size=8).digest()
    place = item.place._replace(file=number)
    return _spoken(item.record, SpokenText("", None, place, int(item.codes.max()), digest=digest))


def _problem(found: ShardProblem, shard: Shard | None) -> RecordProblem:
    """Return a problem of a record with its line, or one of a file, which stops the run."""
    field = found.member or "file"
    if shard is None or not found.line:
        elsewhere = f": its codes are in {found.path / UNITS}" if (found.path / UNITS).is_file() else ""
        return RecordProblem(str(found.path), 0, field, found.expected, found.got + elsewhere)
    if found.path == shard.records:  # "line 3: num_tokens"
        field = found.member.partition(": ")[2] or "record"
    return RecordProblem(str(shard.records), found.line, field, found.expected, found.got)


def _spoken(record: dict, spoken: SpokenText) -> SpokenText:
    """Return a record with all fields beside its codes, which are given."""
    frames = spoken.shape[1]
    seconds, rate = None, None
    for name in (*DURATION_FIELDS, "units_per_second"):
        if record.get(name) is None:
            continue
        value = parse_seconds(record[name], name)
        if value == 0:
            raise MalformedError(name, "a number above 0", shorten(record[name]))
        if name == "units_per_second":
            rate = value
        else:
            seconds = value if seconds is None else seconds
    clean_start = record.get("clean_start_token_idx")
    if clean_start is not None and not (type(clean_start) is int and 0 <= clean_start <= frames):
        expected = f"a frame from 0 to {frames:,}"
        raise MalformedError("clean_start_token_idx", expected, shorten(clean_start))
    return replace(
        spoken,
        text=_text(record, "text"),
        seconds=seconds,
        frame_rate=rate,
        language=next((text for name in LANGUAGE_FIELDS if (text := _text(record, name))), ""),
        instruct=_text(record, "instruct"),
        pinyin=_text(record, "text_pinyin"),
        speaker=_name(record, "speaker"),
        key=_name(record, "id"),
        similar=_names(record.get("similar")),
        clean_start=-1 if clean_start is None else clean_start,
    )


def _text(record: dict, name: str) -> str:
    """Return a text as it is written; "" if there is none, or a blank one."""
    value = record.get(name)
    text = "" if value is None else parse_text(value, name)
    return text if text.strip() else ""


def _name(record: dict, name: str) -> str:
    """Return a name, which may be a number; "" if there is none."""
    value = record.get(name)
    return str(value) if type(value) is int else _text(record, name)


def _names(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise MalformedError("similar", "a list of ids", describe_value(value))
    names = {f"similar[{number}]": item for number, item in enumerate(value)}
    return tuple(_name(names, name) for name in names)


def _levels(value: object) -> np.ndarray:
    """Return uint16[C, T] of lists of numbers."""
    if not isinstance(value, list) or not value or not all(isinstance(level, list) for level in value):
        raise MalformedError("codes", _EXPECTED, describe_value(value))
    lengths = [len(level) for level in value]
    if not lengths[0] or len(set(lengths)) > 1:
        found = " and ".join(f"{length:,}" for length in sorted(set(lengths)))
        raise MalformedError("codes", _EXPECTED, f"lists of {found} numbers")
    for level, codes in enumerate(value):
        if set(map(type, codes)) == {int} and min(codes) >= 0 and max(codes) <= MAX_CODE:  # True is an int, too
            continue
        for frame, code in enumerate(codes):
            if type(code) is not int or not 0 <= code <= MAX_CODE:
                expected = f"a whole number from 0 to {MAX_CODE:,}"
                raise MalformedError(f"codes[{level}][{frame}]", expected, shorten(code))
    return np.array(value, np.uint16)


def _one_level(value: object) -> np.ndarray:
    """Return uint16[1, T] of units."""
    units = parse_units(value, "units")
    if not units:
        raise MalformedError("units", "the codes of the recording", "none")
    if (largest := max(units)) > MAX_CODE:
        raise MalformedError(f"units[{units.index(largest)}]", f"a code up to {MAX_CODE:,}", f"{largest:,}")
    return np.array([units], np.uint16)

"""The table of all formats: how a record is told from those of other formats, and what reads it.

A new format is one entry of FORMATS, and its name one choice of `train_dataset_type`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from erniekit.data.formats.aligned_units import FIELDS as ALIGNED_FIELDS
from erniekit.data.formats.aligned_units import (
    WORDS,
    is_aligned_record,
    parse_aligned_units,
    with_alignment,
)
from erniekit.data.formats.asr import (
    LANGUAGE_FIELDS,
    RECORDING_FIELDS,
    STRETCH_FIELDS,
    TEXT_FIELDS,
    is_asr_record,
    parse_asr,
)
from erniekit.data.formats.dialogues import (
    parse_alpaca,
    parse_erniekit,
    parse_messages_record,
    parse_plain_text,
    parse_prompt_completion,
)
from erniekit.data.formats.files import TEXT, parse_values, read_values
from erniekit.data.formats.format import Format, Record, RefusedFormat
from erniekit.data.formats.media_paths import locate_clips, media_folders
from erniekit.data.formats.preference import (
    parse_alpaca_pair,
    parse_erniekit_pair,
    parse_messages_pair,
    parse_sharegpt_pair,
    preference_kind,
)
from erniekit.data.formats.problems import MARGIN, SCORES, MalformedError, RecordProblem, field_name, shorten
from erniekit.data.formats.recordings import AUDIO_LISTS, with_recordings
from erniekit.data.formats.sharegpt import parse_sharegpt
from erniekit.data.formats.speech_codes import (
    CODES_FIELDS,
    is_codes_record,
    is_shards,
    parse_codes,
    read_shards_of_codes,
)
from erniekit.data.formats.speech_codes import FIELDS as CODED_FIELDS
from erniekit.data.formats.speech_codes import LANGUAGE_FIELDS as SPOKEN_LANGUAGE
from erniekit.data.formats.table import hub_cache_folders, is_hub_dataset
from erniekit.data.formats.token_ids import (
    FIELDS,
    LABELS,
    TOKEN_IDS,
    begins_with_id,
    is_line_of_ids,
    is_token_ids,
    parse_token_ids,
    with_empty_lines,
)
from erniekit.data.formats.unused_fields import BOOKKEEPING_FIELDS, UnusedFields, misspelling
from erniekit.data.formats.verdicts import VERDICTS, has_verdict, verdict_kind, verdict_parser
from erniekit.data.units import ALIGNED_UNITS, CODES

RECOGNISED_RECORDS = 3  # a file's format is judged by so many of its first records

Fits = Callable[[dict], bool]


def _has(*names: str) -> Fits:
    return lambda record: all(record.get(name) is not None for name in names)


def _lists(name: str, *fields: str) -> Fits:
    """Return whether `name` is a list that begins with an object with one of these fields."""

    def fits(record: dict) -> bool:
        items = record.get(name)
        first = items[0] if isinstance(items, list) and items else None
        return isinstance(first, dict) and any(field in first for field in fields)

    return fits


def _is_plain_text(record: dict) -> bool:
    if any(other(record) for other in (is_asr_record, is_token_ids, is_aligned_record, is_codes_record)):
        return False
    return isinstance(record.get("text"), str) or record.keys() - BOOKKEEPING_FIELDS == {"tgt"}


_HAS_ANSWERS = _has("chosen", "rejected")
_IN_CONVERSATIONS = _lists("conversations", "from", "role")

_FORMATS = (
    Format(
        "erniekit", "ERNIEKit's format", "src, tgt", "dialogues",
        frozenset({"src", "tgt", "system", "label", "is_system"}),
        lambda record: _has("src", "tgt")(record) and "response" not in record, parse_erniekit,
    ),
    Format(
        "alpaca", "alpaca", "instruction, output", "dialogues",
        frozenset({"instruction", "input", "output", "history", "system"}),
        _has("instruction", "output"), parse_alpaca,
    ),
    Format(
        "messages", "messages (OpenAI's format)", "messages", "dialogues",
        frozenset({"messages", "tools", "label"}),
        _lists("messages", "role"), parse_messages_record, ("messages",), calls_tools=True,
    ),
    Format(
        "sharegpt", "ShareGPT", "conversations", "dialogues",
        frozenset({"conversations", "system", "tools"}),
        lambda record: _IN_CONVERSATIONS(record) and not _HAS_ANSWERS(record), parse_sharegpt,
        ("conversations",), calls_tools=True,
    ),
    Format(
        "prompt_completion", "prompt and completion", "prompt, completion", "dialogues",
        frozenset({"prompt", "completion", "system", "tools"}),
        _has("prompt", "completion"), parse_prompt_completion, ("prompt", "completion"), calls_tools=True,
    ),
    Format(
        "asr", "recordings and their transcripts (asr)", "audio_path, text", "dialogues",
        frozenset({*RECORDING_FIELDS, *TEXT_FIELDS, *LANGUAGE_FIELDS, *STRETCH_FIELDS}),
        is_asr_record, parse_asr, alternatives=(RECORDING_FIELDS, TEXT_FIELDS, LANGUAGE_FIELDS),
    ),
    Format(
        ALIGNED_UNITS, "units with aligned words", "units, words", "tokens", ALIGNED_FIELDS,
        is_aligned_record, parse_aligned_units, alternatives=(WORDS,),
    ),
    Format(
        TOKEN_IDS, "token ids", "input_ids, labels", "tokens", frozenset({*FIELDS, LABELS}),
        is_token_ids, parse_token_ids, alternatives=(FIELDS,),
    ),
    Format("text", "plain text", "text", "text", frozenset({"text", "tgt"}), _is_plain_text, parse_plain_text),
    Format(
        CODES, "recordings as codes", "codes, text", "codes", CODED_FIELDS,
        is_codes_record, parse_codes, alternatives=(CODES_FIELDS, SPOKEN_LANGUAGE),
    ),
    Format(
        "erniekit", "ERNIEKit's pairs", "src, response, sort", "pairs",
        frozenset({"src", "tgt", "response", "sort", "system", "is_system"}),
        _has("src", "response"), parse_erniekit_pair,
    ),
    Format(
        "alpaca", "alpaca's pairs", "instruction, chosen, rejected", "pairs",
        frozenset({"question", "instruction", "input", "history", "system", "chosen", "rejected", *SCORES, MARGIN}),
        lambda record: _HAS_ANSWERS(record) and ("question" in record or "instruction" in record), parse_alpaca_pair,
    ),
    Format(
        "messages", "pairs of messages", "prompt, chosen, rejected", "pairs",
        frozenset({"prompt", "chosen", "rejected", *SCORES, MARGIN}),
        lambda record: _HAS_ANSWERS(record)
        and ("prompt" in record or all(_lists(name, "role")(record) for name in ("chosen", "rejected"))),
        parse_messages_pair, ("prompt", "chosen", "rejected"),
    ),
    Format(
        "sharegpt", "ShareGPT's pairs", "conversations, chosen, rejected", "pairs",
        frozenset({"conversations", "system", "chosen", "rejected", *SCORES, MARGIN}),
        lambda record: _IN_CONVERSATIONS(record) and _HAS_ANSWERS(record), parse_sharegpt_pair,
        ("conversations", "chosen", "rejected"),
    ),
)  # fmt: skip

_WITH_VERDICTS = ("erniekit", "alpaca", "messages", "sharegpt", "prompt_completion")


def _verdicts(form: Format) -> Format:
    """Return the format of answers with a verdict that are written as dialogues of a format."""
    return replace(
        form,
        title=f"{form.title}, answers with a verdict",
        required=f"{form.required}, label",
        records="verdicts",
        fields=frozenset({*(form.fields - {"tools"}), *VERDICTS}),
        fits=lambda record: has_verdict(record) and form.fits(record),
        parse=verdict_parser(form.parse),  # type: ignore[arg-type]
        calls_tools=False,
    )


def _with_recordings(form: Format) -> Format:
    """Return a format of dialogues or pairs with the field of recordings, which all of them may have."""
    if form.records in ("text", "tokens", "codes") or form.alternatives:
        return form
    return replace(form, fields=form.fields | set(AUDIO_LISTS), alternatives=(AUDIO_LISTS,))


def _without_verdict(form: Format) -> Format:
    """Return a format of dialogues whose records have no verdict; reading refuses those that do."""
    if form.records != "dialogues":
        return form
    return replace(form, fits=lambda record: not has_verdict(record) and form.fits(record))


FORMATS: dict[str, Format] = {
    preference_kind(form.name) if form.records == "pairs" else form.name: _with_recordings(_without_verdict(form))
    for form in _FORMATS
} | {
    verdict_kind(form.name): _with_recordings(_verdicts(form))
    for form in _FORMATS
    if form.records == "dialogues" and form.name in _WITH_VERDICTS
}
KINDS = tuple(FORMATS)
PAIR_KINDS = tuple(kind for kind, form in FORMATS.items() if form.records == "pairs")
VERDICT_KINDS = tuple(kind for kind, form in FORMATS.items() if form.records == "verdicts")
BRANCHED_KINDS = PAIR_KINDS + VERDICT_KINDS  # a prompt with two answers: verdicts get one to another prompt
_STAGES = {
    "text": "PT",
    "dialogues": "SFT",
    "pairs": "DPO or RM",
    "verdicts": "KTO",
    "tokens": "PT or SFT",
    "codes": "TTS",
}
_CONTENTS = {
    "text": "plain text", "dialogues": "dialogues", "pairs": "pairs of answers",
    "verdicts": "answers with a verdict", "tokens": "tokens",
    "codes": "recordings as codes",
}  # fmt: skip


def _with_values(*names: str) -> Fits:
    return lambda record: any(record.get(name) for name in names)


def _is_unpaired(record: dict) -> bool:
    """Return whether one answer has a verdict."""
    return has_verdict(record) and _with_values("messages", "conversations", "completion", "output", "tgt")(record)


REFUSED_FORMATS = (
    RefusedFormat(
        "images", "a vision record", _with_values("images", "image", "image_info"), "ERNIEKit does not read images"
    ),
    RefusedFormat(
        "videos", "a video record", _with_values("videos", "video", "video_info"), "ERNIEKit does not read videos"
    ),
    RefusedFormat(
        "label", "an answer with a verdict", _is_unpaired, "write stage: KTO to train it", allowed=("verdicts",)
    ),
)  # fmt: skip


def read_records(
    path: str | Path, kind: str, unused: UnusedFields | None = None, media_dir: Sequence[str] = ()
) -> Iterator[tuple[int, Record] | RecordProblem]:
    """Yield (line, record) for every record of a file, in file order, and a problem for each malformed one.

    Streams: one record at a time is in memory. The content of the file never raises: a missing or empty file, text that
    is not UTF-8 and broken JSON are problems too.

    Args:
        path: a file (see `files.read_values`), or the name of a data set of the Hugging Face hub; for kind `codes` also
            a folder of shards, their index, or a tar file.
        kind: one of KINDS.
        unused: counts the fields that the format does not use.
        media_dir: the folders below which recordings lie; see `media_paths.media_folders`.
    """
    if kind == CODES and is_shards(path):
        yield from read_shards_of_codes(path, unused)
        return
    form = FORMATS[kind]
    in_cache = is_hub_dataset(path) and not media_dir
    folders = media_folders(path, hub_cache_folders() if in_cache else media_dir)

    def parse(line: int, value: object) -> tuple[int, Record]:
        record = parse_record(form, value, folders)
        if unused is not None and isinstance(value, dict):
            unused.add(line, value)
        return line, record

    items = parse_values(path, parse)
    of_lines = kind == TOKEN_IDS and Path(path).suffix.lower() == TEXT
    yield from with_empty_lines(path, items) if of_lines else items


def parse_record(form: Format, value: object, folders: Sequence[str] | None = None) -> Record:
    """Parse one value of a file.

    Args:
        folders: below which its recordings lie (see `media_paths.media_folders`); None: the current folder.

    Raises:
        MalformedError: it is not a record of this format, or of a kind that ERNIEKit refuses.
    """
    if not isinstance(value, dict):
        raise MalformedError("record", "a JSON object", shorten(value))
    for refused in REFUSED_FORMATS:
        if form.records not in refused.allowed and refused.fits(value):
            raise MalformedError(refused.field, _CONTENTS[form.records], f"{refused.title}; {refused.reason}")
    try:
        parsed = with_recordings(value, form.parse(value))
        folders = media_folders("") if folders is None else folders
        return with_alignment(locate_clips(parsed, value, folders), value, folders)
    except MalformedError as error:
        written = misspelling(form, value, error.field) if error.got == "nothing" else None
        if written is None:
            raise
        raise type(error)(
            error.field, error.expected, f"nothing, but {field_name(written)}: did you mean it?"
        ) from None


def recognise(path: str | Path, kind: str) -> str | RecordProblem:
    """Return the kind of format that a file's first records have, judged by their characteristic fields.

    It is `kind` itself if any of them fits it, or if they cannot be read: reading the file tells what is wrong with it.
    A problem says what the records are if they fit several formats, hold something else than `kind` does (pairs instead
    of dialogues), or have no field of it.
    """
    declared = FORMATS[kind]
    if kind == CODES and is_shards(path):
        return kind
    items = list(islice(_readable(path), RECOGNISED_RECORDS))
    records = [value for _, value in items if isinstance(value, dict)]
    if not records or len(records) < len(items):
        return kind
    for refused in REFUSED_FORMATS:
        if not refused.allowed and all(
            refused.fits(record) for record in records
        ):  # so do not refuse record after record
            got = f"{refused.title}, as in what follows; {refused.reason}"
            return RecordProblem(str(path), items[0][0], refused.field, _CONTENTS[declared.records], got)
    if any(declared.fits(record) for record in records):
        return kind
    if kind == TOKEN_IDS and all(begins_with_id(record) for record in records):
        return kind  # reading judges the lines of a text file one by one
    if kind == CODES and any(is_asr_record(record) for record in records):
        return kind  # reading says that codes are to be made of recordings first
    found = [other for other, form in FORMATS.items() if all(form.fits(record) for record in records)]
    alike = [other for other in found if _one_stage_reads(declared, FORMATS[other])]
    if len(alike) == 1:
        return alike[0]
    if alike:
        several = " or ".join(FORMATS[other].name for other in alike)
        return RecordProblem(str(path), 0, "format", declared.name, f"what could be {several}: write which it is")
    if found:
        return RecordProblem(str(path), 0, "format", *_other_contents(declared, FORMATS[found[0]]))
    names = sorted({name for record in records for name in record})
    misspelt = any(misspelling(declared, records[0], name) for name in declared.fields)
    if declared.fields.isdisjoint(names) and not misspelt:
        known = ", ".join(
            f"{form.name} ({form.required})" for form in FORMATS.values() if _one_stage_reads(declared, form)
        )
        got = f"the fields {', '.join(field_name(name) for name in names[:8])}, which no format has"
        return RecordProblem(str(path), 0, "format", f"records of one of the formats {known}", got)
    return kind


def looks_like_ids(path: str | Path) -> bool:
    """Return whether the first lines of a text file hold nothing but whole numbers, many of them."""
    values = [value for _, value in islice(_readable(path), RECOGNISED_RECORDS)]
    return bool(values) and all(isinstance(value, dict) and is_line_of_ids(value) for value in values)


def _one_stage_reads(form: Format, other: Format) -> bool:
    """Return whether a stage that reads records of the one format may read those of the other."""
    kinds = {form.records, other.records}
    return len(kinds) == 1 or ("tokens" in kinds and kinds.isdisjoint({"pairs", "verdicts", "codes"}))


def _other_contents(declared: Format, found: Format) -> tuple[str, str]:
    """Return what was expected of a file and what was found, where that is for another stage."""
    return (
        f"{_CONTENTS[declared.records]}, which stage {_STAGES[declared.records]} reads",
        f"what looks like {found.title}: write stage: {_STAGES[found.records]} to train it",
    )


def _readable(path: str | Path) -> Iterator[tuple[int, object]]:
    for item in read_values(path):
        if isinstance(item, RecordProblem):
            return
        yield item

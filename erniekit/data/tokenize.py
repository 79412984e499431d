"""Turn records into samples, a block at a time: rendering, encoding, and the policy for samples that are too long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from erniekit.data.alignment_facts import AlignmentFiles
from erniekit.data.conversation import Conversation, PlainText, Preference, Source
from erniekit.data.drawing import Drawing
from erniekit.data.encode import SourceRun, encoder_of
from erniekit.data.formats.format import Record
from erniekit.data.formats.problems import Effect, RecordProblem, SourceProblems
from erniekit.data.formats.registry import BRANCHED_KINDS, FORMATS, VERDICT_KINDS, recognise
from erniekit.data.formats.token_ids import TOKEN_IDS
from erniekit.data.formats.unused_fields import UnusedFields
from erniekit.data.formats.verdicts import with_other_answers
from erniekit.data.interleave import Interleaving
from erniekit.data.media.clip import AudioInputs, Clip
from erniekit.data.media.errors import RecordingError, describe_clip
from erniekit.data.overlong import character_limit, count_characters, last_rounds
from erniekit.data.placeholders import NO_ENCODER, TEXT_ONLY, Recordings, clips_of, measure
from erniekit.data.speech_samples import SpeechIndex, SpeechSettings
from erniekit.data.split import read_part
from erniekit.data.templates.ernie import Sample, Template
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.data.units import ALIGNED_UNITS, CODES, AlignedUnits, SpokenText, TokenIds
from erniekit.errors import DataError

OVER_LENGTH_POLICIES = ("drop", "truncate_turns", "error")
BAD_RECORD_POLICIES = ("stop", "skip")
BLOCK_RECORDS = 1000
BLOCK_CHARACTERS = 2_000_000  # while a block is encoded, each of its tokens takes about a hundred bytes
_CHARACTERS_PER_ID = 4  # of what counts as its length, where a record has ids and no text

NumberedRecord = tuple[int, Record]  # with its line in the file


@dataclass(frozen=True, slots=True)
class TokenizationSettings:
    """Everything except the file itself that determines its samples; see dataset.open_dataset."""

    tokenizer: Tokenizer
    template: Template | None
    max_seq_len: int
    over_length: str
    max_prompt_len: int | None = None
    needs_scores: bool = False
    on_bad_record: str = "stop"
    split_multi_turn: bool | None = None
    audio: AudioInputs | None = None
    drawing: Drawing | None = None
    speech: SpeechSettings | None = None
    scored: bool = False
    pair_window: int | None = None

    def __post_init__(self) -> None:
        if self.over_length not in OVER_LENGTH_POLICIES:
            raise DataError(f"over_length {self.over_length!r}: expected one of {', '.join(OVER_LENGTH_POLICIES)}")
        if self.on_bad_record not in BAD_RECORD_POLICIES:
            raise DataError(f"on_bad_record {self.on_bad_record!r}: expected one of {', '.join(BAD_RECORD_POLICIES)}")

    @property
    def skips_bad_records(self) -> bool:
        """Whether malformed records are left out; otherwise they stop the run."""
        return self.on_bad_record == "skip"

    def key(self, kind: str) -> tuple:
        """Return everything here that determines the samples of the sound records of a source of this kind."""
        unrendered = kind in (TOKEN_IDS, ALIGNED_UNITS, CODES)
        template = None if unrendered or self.template is None else self.template.fingerprint
        pair_settings: tuple = (self.max_prompt_len, self.needs_scores) if kind in BRANCHED_KINDS else ()
        pair_settings += ("scored",) if self.scored else ()
        if kind in BRANCHED_KINDS and self.pair_window is not None:
            pair_settings += (f"pair_window {self.pair_window}",)
        prefix = self.tokenizer.document_prefix if kind == "text" else ()
        split = () if self.split_multi_turn is None else (f"split_multi_turn {self.split_multi_turn}",)
        audio = () if self.audio is None else (("audio", self.audio.fingerprint),)
        aligned = ()
        if kind == ALIGNED_UNITS and isinstance(self.drawing, Interleaving):
            aligned = self.drawing.key(self.over_length)
        speech = (astuple(self.speech),) if kind == CODES and self.speech is not None else ()
        own = (*pair_settings, *prefix, *split, *audio, *aligned, *speech)
        return self.tokenizer.fingerprint, template, self.max_seq_len, self.over_length, *own


@dataclass(slots=True)
class RecordCounts:
    """Counts of the records of one source; see dataset_report.SourceReport."""

    read: int = 0
    dropped: int = 0
    long_prompts: int = 0
    truncated: int = 0
    split: int = 0
    skipped: int = 0
    split_dialogues: int = 0
    dropped_answers: int = 0
    plain_control: int = 0
    outside: int = 0
    repeated_prompts: int = 0


def tokenise(
    source: Source,
    settings: TokenizationSettings,
    counts: RecordCounts,
    unused: UnusedFields,
    problems: SourceProblems,
    *,
    files: AlignmentFiles | None = None,
    speech: SpeechIndex | None = None,
    block_records: int = BLOCK_RECORDS,
) -> Iterator[tuple[list[Sample], list[int]]]:
    """Yield the samples of a source and the lines of their records, a block of records at a time, in file order.

    Malformed records are added to `problems` and yield no sample. A file of another format than the source says is one
    problem, and is not read further.

    Args:
        files: takes the files that words were read from.
        speech: takes the facts of recordings as codes.
    """
    found = recognise(source.path, source.kind)
    if found != source.kind:
        problem = found if isinstance(found, RecordProblem) else _wrong_format(source, found)
        if not problems.skips(problem):
            problems.add(problem)
            return
    speech = SpeechIndex(source.path) if speech is None and source.kind == CODES else speech
    encode, run = encoder_of(source.kind), SourceRun(source, settings, counts, problems, speech)
    for block in _blocks(source, settings, counts, unused, problems, block_records):
        samples: list[Sample] = []
        lines: list[int] = []
        for _, record in block:
            if isinstance(record, AlignedUnits) and record.alignment and files is not None:
                files.add(record.alignment)
        promising = _without_hopeless(block, source, settings, counts, problems)
        readable, recordings = _with_recordings(promising, source, settings, problems)
        for line, sample in encode(readable, recordings, run):
            samples.append(sample)
            lines.append(line)
        yield samples, lines


def _wrong_format(source: Source, found: str) -> RecordProblem:
    """Return the problem of a file whose records look like those of another format."""
    form = FORMATS[found]
    got = f"what looks like {form.title}: write {source.type_parameter}: {form.name}"
    return RecordProblem(str(source.path), 0, "format", FORMATS[source.kind].name, got)


def _blocks(
    source: Source,
    settings: TokenizationSettings,
    counts: RecordCounts,
    unused: UnusedFields,
    problems: SourceProblems,
    block_records: int,
) -> Iterator[list[NumberedRecord]]:
    """Yield records in blocks limited by number and by characters; each pair of a ranking is one."""
    block: list[NumberedRecord] = []
    characters = 0
    items: Iterator[NumberedRecord | RecordProblem] = read_part(source, unused)
    if source.kind in VERDICT_KINDS:
        items = with_other_answers(items, str(source.path))  # type: ignore[arg-type]
    for item in items:
        if isinstance(item, RecordProblem):
            problems.add(item)
            counts.read += item.line > 0
            continue
        line, record = item
        pairs = (record, *record.others) if isinstance(record, Preference) else (record,)
        counts.read += len(pairs)
        if len(pairs) > 1 and not settings.scored:
            expected = "two answers (stage DPO reads pairs; write stage: RM to train rankings of more)"
            problems.add(RecordProblem(str(source.path), line, "response", expected, "a ranking of more"))
            continue
        block += [(line, each) for each in pairs]
        characters += sum(map(_characters, pairs))
        if len(block) >= block_records or characters >= BLOCK_CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block


def _without_hopeless(
    block: list[NumberedRecord],
    source: Source,
    settings: TokenizationSettings,
    counts: RecordCounts,
    problems: SourceProblems,
) -> list[NumberedRecord]:
    """Return the records without dialogues and pairs that have too many characters to fit, which are not encoded.

    Dialogues that may be split are not judged. Under "truncate_turns" the others lose their oldest rounds first; if
    something is left, truncation by tokens, which counts it, follows.
    """
    limit = character_limit(settings.max_seq_len)
    promising = []
    for line, record in block:
        kept: Record | None = record
        if isinstance(record, (PlainText, TokenIds, AlignedUnits, SpokenText)) or _may_be_split(record, settings):
            promising.append((line, record))
            continue
        if (characters := count_characters(record)) > limit:
            kept = last_rounds(record, limit) if settings.over_length == "truncate_turns" else None
            if settings.over_length == "error":
                expected = f"at most {settings.max_seq_len:,} tokens (max_seq_len)"
                got = f"{characters:,} characters"
                problems.add(RecordProblem(str(source.path), line, "length", expected, got, Effect.STOP))
            else:
                counts.dropped += kept is None
        if kept is not None:
            promising.append((line, kept))
    return promising


def _with_recordings(
    block: list[NumberedRecord], source: Source, settings: TokenizationSettings, problems: SourceProblems
) -> tuple[list[NumberedRecord], Recordings]:
    """Return the records whose recordings can be used, and the lengths of these recordings."""
    if settings.audio is None:
        without = [numbered for numbered in block if not clips_of(numbered[1])]
        for line, record in block if len(without) < len(block) else ():
            if clips_of(record):
                problems.add(RecordProblem(str(source.path), line, "record", "text", NO_ENCODER, Effect.STOP))
        return without, TEXT_ONLY
    measured = measure((clip for _, record in block for clip in clips_of(record)), settings.audio)
    lengths, readable = {}, []
    for line, record in block:
        usable = True
        for clip in clips_of(record):
            found = measured[clip]
            if isinstance(found, RecordingError):
                problems.add(recording_problem(source, line, clip, found))
                usable = False
            else:
                lengths[clip] = found
        if usable:
            readable.append((line, record))
    return readable, Recordings(settings.audio, lengths)


def recording_problem(source: Source, line: int, clip: Clip, error: RecordingError) -> RecordProblem:
    """Return the problem of a record whose recording cannot be used."""
    return RecordProblem(str(source.path), line, describe_clip(clip), error.expected, error.got)


def _may_be_split(record: Conversation | Preference, settings: TokenizationSettings) -> bool:
    """Return whether a dialogue may become several samples, of which the first may fit."""
    if isinstance(record, Preference) or settings.split_multi_turn is False:
        return False
    return sum(turn.trained for turn in record.turns) > 1


def _characters(record: Record) -> int:
    """Return the number of characters of a record's texts."""
    if isinstance(record, PlainText):
        return len(record.text)
    if isinstance(record, TokenIds):
        return _CHARACTERS_PER_ID * len(record.ids)
    if isinstance(record, AlignedUnits):
        return _CHARACTERS_PER_ID * len(record.units) + sum(len(word.text) for word in record.words)
    if isinstance(record, SpokenText):
        return len(record.text) + (0 if record.codes is None else record.codes.size)
    if isinstance(record, Preference):
        return _characters(record.prompt) + sum(len(turn.content) for turn in (*record.chosen, *record.rejected))
    texts = sum(len(turn.content) + len(turn.thoughts) for turn in record.turns)
    calls = sum(len(json.dumps(turn.fields, ensure_ascii=False)) for turn in record.turns if turn.fields)
    return len(record.system) + texts + calls + (len(json.dumps(record.tools)) if record.tools else 0)

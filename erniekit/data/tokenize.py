"""Turn records into samples, a block at a time: rendering, encoding, and the policy for samples that are too long."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from erniekit.data.conversation import Conversation, PlainText, Preference, Source
from erniekit.data.formats.format import Record
from erniekit.data.formats.problems import (
    Effect,
    MalformedError,
    RecordProblem,
    SourceProblems,
)
from erniekit.data.formats.registry import FORMATS, PAIR_KINDS, recognise
from erniekit.data.formats.unused_fields import UnusedFields
from erniekit.data.media.clip import AudioInputs, Clip
from erniekit.data.media.errors import RecordingError, describe_clip
from erniekit.data.overlong import character_limit, count_characters, last_rounds
from erniekit.data.pairs import RenderedPair, assemble_pair, render_pair, render_pairs
from erniekit.data.placeholders import NO_ENCODER, TEXT_ONLY, Recordings, clips_of, measure
from erniekit.data.split import read_part
from erniekit.data.templates.ernie import (
    Sample,
    Segment,
    Template,
    TemplateRefusedError,
    assemble,
    encode_plain_text,
)
from erniekit.data.templates.samples import render_samples
from erniekit.data.tokenizers.breaks import BREAK
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.errors import DataError

OVER_LENGTH_POLICIES = ("drop", "truncate_turns", "error")
BAD_RECORD_POLICIES = ("stop", "skip")
BLOCK_RECORDS = 1000
BLOCK_CHARACTERS = 2_000_000  # while a block is encoded, each of its tokens takes about a hundred bytes
MIN_SCORE_DIFFERENCE = 1e-30  # a smaller difference is 0 in float32, and its logarithm infinite

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
        template = self.template.fingerprint if self.template else None
        pair_settings = (self.max_prompt_len, self.needs_scores) if kind in PAIR_KINDS else ()
        prefix = self.tokenizer.document_prefix if kind == "text" else ()
        split = () if self.split_multi_turn is None else (f"split_multi_turn {self.split_multi_turn}",)
        audio = () if self.audio is None else (("audio", self.audio.fingerprint),)
        own = (*pair_settings, *prefix, *split, *audio)
        return self.tokenizer.fingerprint, template, self.max_seq_len, self.over_length, *own


@dataclass(slots=True)
class RecordCounts:
    """Counts of the records of one source; see dataset.SourceReport."""

    read: int = 0
    dropped: int = 0
    long_prompts: int = 0
    truncated: int = 0
    split: int = 0
    skipped: int = 0
    split_dialogues: int = 0
    dropped_answers: int = 0
    plain_control: int = 0


def tokenise(
    source: Source,
    settings: TokenizationSettings,
    counts: RecordCounts,
    unused: UnusedFields,
    problems: SourceProblems,
    *,
    block_records: int = BLOCK_RECORDS,
) -> Iterator[tuple[list[Sample], list[int]]]:
    """Yield the samples of a source and the lines of their records, a block of records at a time, in file order.

    Malformed records are added to `problems` and yield no sample. A file of another format than the source says is one
    problem, and is not read further.
    """
    found = recognise(source.path, source.kind)
    if found != source.kind:
        problem = found if isinstance(found, RecordProblem) else _wrong_format(source, found)
        if not problems.skips(problem):
            problems.add(problem)
            return
    for block in _blocks(source, counts, unused, problems, block_records):
        samples: list[Sample] = []
        lines: list[int] = []
        encode = _ENCODERS.get(source.kind, _encode_conversations)
        promising = _without_hopeless(block, source, settings, counts, problems)
        readable, recordings = _with_recordings(promising, source, settings, problems)
        for line, sample in encode(readable, recordings, source, settings, counts, problems):
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
    counts: RecordCounts,
    unused: UnusedFields,
    problems: SourceProblems,
    block_records: int,
) -> Iterator[list[NumberedRecord]]:
    """Yield records in blocks limited by number and by characters."""
    block: list[NumberedRecord] = []
    characters = 0
    for item in read_part(source, unused):
        if isinstance(item, RecordProblem):
            problems.add(item)
            counts.read += item.line > 0
            continue
        counts.read += 1
        block.append(item)
        characters += _characters(item[1])
        if len(block) == block_records or characters >= BLOCK_CHARACTERS:
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
        if isinstance(record, PlainText) or _may_be_split(record, settings):
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
    if isinstance(record, Preference):
        return _characters(record.prompt) + sum(len(turn.content) for turn in (*record.chosen, *record.rejected))
    texts = sum(len(turn.content) + len(turn.thoughts) for turn in record.turns)
    calls = sum(len(json.dumps(turn.fields, ensure_ascii=False)) for turn in record.turns if turn.fields)
    return len(record.system) + texts + calls + (len(json.dumps(record.tools)) if record.tools else 0)


def _encode_texts(
    block: list[NumberedRecord],
    recordings: Recordings,
    source: Source,
    settings: TokenizationSettings,
    counts: RecordCounts,
    problems: SourceProblems,
) -> Iterator[tuple[int, Sample]]:
    """Encode plain texts. Every token is a target: labels are shifted before a long text is cut."""
    del recordings
    texts = [settings.tokenizer.answer_text(record.text) for _, record in block if isinstance(record, PlainText)]
    counts.plain_control += sum(BREAK in text for text in texts)
    encoded = settings.tokenizer.encode_batch(texts)
    for (line, _), ids in zip(block, encoded, strict=True):
        if not ids:
            problems.add(_no_tokens_problem(source, line, "text", "text that leaves a token"))
            continue
        full_sample = encode_plain_text(ids, settings.tokenizer.eos_id, settings.tokenizer.document_prefix)
        length = len(full_sample.input_ids)
        counts.split += length > settings.max_seq_len
        for start in range(0, length, settings.max_seq_len):
            part = slice(start, start + settings.max_seq_len)
            yield line, Sample(full_sample.input_ids[part], full_sample.labels[part])


def _encode_conversations(
    block: list[NumberedRecord],
    recordings: Recordings,
    source: Source,
    settings: TokenizationSettings,
    counts: RecordCounts,
    problems: SourceProblems,
) -> Iterator[tuple[int, Sample]]:
    assert settings.template is not None
    conversations = [record for _, record in block if isinstance(record, Conversation)]
    rendered = []
    results = render_samples(settings.template, conversations, settings.split_multi_turn)
    for (line, _), result in zip(block, results, strict=True):
        if isinstance(result, TemplateRefusedError):
            problems.add(_refused_problem(source, line, result))
        else:
            rendered.append((line, result))
    segments = [part for _, parts in rendered for rendered_sample in parts for part in rendered_sample.segments]
    encoded = iter(settings.tokenizer.encode_batch([part.text for part in segments]))
    for line, parts in rendered:
        counts.split_dialogues += len(parts) > 1
        counts.plain_control += any(BREAK in segment.text for _, segments in parts for segment in segments)
        dropped = truncated = 0
        for conversation, segments in parts:
            ids = [next(encoded) for _ in segments]
            try:
                sample = _sample(segments, ids, conversation.clips, recordings, settings.template)
            except TemplateRefusedError as error:
                problems.add(_refused_problem(source, line, error))
                continue
            if not len(sample.input_ids):
                expected = "a trained answer that leaves a token to predict"
                problems.add(_no_tokens_problem(source, line, "record", expected))
            elif len(sample.input_ids) <= settings.max_seq_len:
                yield line, sample
            elif settings.over_length == "error":
                expected = f"at most {settings.max_seq_len:,} tokens (max_seq_len)"
                got = f"{len(sample.input_ids):,}"
                problems.add(RecordProblem(str(source.path), line, "length", expected, got, Effect.STOP))
            else:
                truncates = settings.over_length == "truncate_turns"
                shorter = _truncate_turns(conversation, recordings, settings) if truncates else None
                truncated += shorter is not None
                dropped += shorter is None
                if shorter is not None:
                    yield line, shorter
        counts.truncated += truncated > 0
        counts.dropped += dropped == len(parts)
        counts.dropped_answers += dropped if dropped < len(parts) else 0


def _encode_preferences(
    block: list[NumberedRecord],
    recordings: Recordings,
    source: Source,
    settings: TokenizationSettings,
    counts: RecordCounts,
    problems: SourceProblems,
) -> Iterator[tuple[int, Sample]]:
    assert settings.template is not None
    usable = []
    for line, record in block:
        assert isinstance(record, Preference)
        if settings.needs_scores and (record.score_difference or 0) < MIN_SCORE_DIFFERENCE:
            expected = "scores in which the chosen answer's is the higher (offset_alpha needs them)"
            got = "none" if record.score_difference is None else f"a difference of {record.score_difference:g}"
            problems.add(RecordProblem(str(source.path), line, "score_chosen", expected, got))
            continue
        usable.append((line, record))
    rendered = []
    results = render_pairs(settings.template, [record for _, record in usable])
    for (line, record), result in zip(usable, results, strict=True):
        if isinstance(result, TemplateRefusedError):
            problems.add(_refused_problem(source, line, result))
        else:
            rendered.append((line, record, result))
            counts.plain_control += any(BREAK in segment.text for segment in result.segments)
    encoded = iter(settings.tokenizer.encode_batch([part.text for _, _, pair in rendered for part in pair.segments]))
    for line, record, pair in rendered:
        ids = [next(encoded) for _ in pair.segments]
        try:
            full_sample, prompt = _pair(pair, ids, record, recordings, settings.template)
            sample, prompt = _truncate_prompt(record, full_sample, prompt, recordings, settings)
        except MalformedError as error:
            problems.add(RecordProblem(str(source.path), line, error.field, error.expected, error.got, error.effect))
            continue
        except TemplateRefusedError as error:
            problems.add(_refused_problem(source, line, error))
            continue
        if _fits(sample, prompt, settings):
            counts.truncated += sample is not full_sample
            yield line, sample
        elif settings.over_length == "error":
            problems.add(_too_long_problem(source, line, sample, prompt, settings))
        else:
            counts.dropped += 1
            counts.long_prompts += not _prompt_fits(prompt, settings)


def _pair(
    pair: RenderedPair,
    ids: Sequence[Sequence[int]],
    record: Preference,
    recordings: Recordings,
    template: Template,
) -> tuple[Sample, int]:
    """Return the sample of a rendered pair, with its recordings, and the tokens of its prompt."""
    clips = clips_of(record)
    sample, prompt = assemble_pair(pair, recordings.expand(ids, clips), template, record.score_difference)
    return recordings.with_clips(sample, clips), prompt


def _prompt_fits(prompt: int, settings: TokenizationSettings) -> bool:
    return settings.max_prompt_len is None or prompt <= settings.max_prompt_len


def _fits(sample: Sample, prompt: int, settings: TokenizationSettings) -> bool:
    return _prompt_fits(prompt, settings) and len(sample.input_ids) <= settings.max_seq_len


def _truncate_prompt(
    record: Preference, sample: Sample, prompt: int, recordings: Recordings, settings: TokenizationSettings
) -> tuple[Sample, int]:
    """Drop as few of the prompt's oldest rounds as makes the pair fit; return the pair and its prompt's length in
    tokens.

    A prompt longer than max_prompt_len loses rounds under any over_length policy; a pair longer than max_seq_len only
    under "truncate_turns". The last question stays, so that a pair may still not fit.
    """
    assert settings.template is not None
    template, tokenizer = settings.template, settings.tokenizer
    max_dropped = record.prompt.rounds - 1
    fits = _fits if settings.over_length == "truncate_turns" else lambda _, prompt, of: _prompt_fits(prompt, of)
    if not max_dropped or fits(sample, prompt, settings):
        return sample, prompt

    def pair_without(rounds: int) -> tuple[Sample, int]:
        shorter = replace(record, prompt=record.prompt.drop_oldest_rounds(rounds))
        pair = render_pair(template, shorter)
        encoded = tokenizer.encode_batch([part.text for part in pair.segments])
        return _pair(pair, encoded, shorter, recordings, template)

    # The more rounds are dropped, the shorter the pair; if none fits, this drops all that may go.
    return pair_without(
        bisect_left(range(max_dropped), True, lo=1, key=lambda num_dropped: fits(*pair_without(num_dropped), settings))
    )


def _too_long_problem(
    source: Source, line: int, sample: Sample, prompt: int, settings: TokenizationSettings
) -> RecordProblem:
    """Return the problem of a pair that is too long even without the turns it may lose."""
    if not _prompt_fits(prompt, settings):
        expected = f"at most {settings.max_prompt_len:,} tokens (max_prompt_len) in system text and last question"
        return RecordProblem(str(source.path), line, "prompt", expected, f"{prompt:,}", Effect.STOP)
    expected = f"at most {settings.max_seq_len:,} tokens (max_seq_len) in prompt and both answers"
    return RecordProblem(str(source.path), line, "length", expected, f"{len(sample.input_ids):,}", Effect.STOP)


_ENCODERS = {"text": _encode_texts, **dict.fromkeys(PAIR_KINDS, _encode_preferences)}


def _refused_problem(source: Source, line: int, error: TemplateRefusedError) -> RecordProblem:
    return RecordProblem(str(source.path), line, "record", "a dialogue the template takes", str(error))


def _no_tokens_problem(source: Source, line: int, field: str, expected: str) -> RecordProblem:
    got = "none: the tokenizer drops every character"
    return RecordProblem(str(source.path), line, field, expected, got, Effect.SKIP)


def _sample(
    segments: Sequence[Segment],
    ids: Sequence[Sequence[int]],
    clips: Sequence[Clip],
    recordings: Recordings,
    template: Template,
) -> Sample:
    """Return the sample of a rendered dialogue, with its recordings."""
    return recordings.with_clips(assemble(segments, recordings.expand(ids, clips), template), clips)


def _truncate_turns(
    conversation: Conversation, recordings: Recordings, settings: TokenizationSettings
) -> Sample | None:
    """Return the sample without as few of the oldest rounds as makes it fit; None if no round with a target fits."""
    assert settings.template is not None
    template, tokenizer = settings.template, settings.tokenizer

    def sample_without(rounds: int) -> Sample:
        shorter = conversation.drop_oldest_rounds(rounds)
        segments = template.render(shorter)
        encoded = tokenizer.encode_batch([segment.text for segment in segments])
        return _sample(segments, encoded, shorter.clips, recordings, template)

    def fits(rounds: int) -> bool:
        return len(sample_without(rounds).input_ids) <= settings.max_seq_len

    # The later the start, the shorter; the full dialogue does not fit, and at least one round has to stay.
    rounds = conversation.rounds
    num_dropped = bisect_left(range(rounds), True, lo=1, hi=rounds, key=fits)
    if num_dropped == rounds:
        return None
    shorter = sample_without(num_dropped)
    return shorter if len(shorter.input_ids) else None

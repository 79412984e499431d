"""Encode a block of rendered records as samples, with the policies for samples that are too long."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from erniekit.data.aligned_samples import encode_aligned_units
from erniekit.data.conversation import Conversation, PlainText, Preference, Source
from erniekit.data.formats.problems import Effect, MalformedError, RecordProblem, SourceProblems
from erniekit.data.formats.registry import BRANCHED_KINDS, VERDICT_KINDS
from erniekit.data.formats.token_ids import TOKEN_IDS
from erniekit.data.media.clip import Clip
from erniekit.data.pairs import PairLayout, RenderedPair, assemble_pair, render_pair, render_pairs
from erniekit.data.placeholders import Recordings, clips_of
from erniekit.data.ready_tokens import encode_token_ids
from erniekit.data.speech_samples import encode_speech
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
from erniekit.data.units import ALIGNED_UNITS, CODES

if TYPE_CHECKING:
    from erniekit.data.speech_samples import SpeechIndex
    from erniekit.data.tokenize import NumberedRecord, RecordCounts, TokenizationSettings

    BlockEncoder = Callable[[list[NumberedRecord], Recordings, "SourceRun"], Iterator[tuple[int, Sample]]]

MIN_SCORE_DIFFERENCE = 1e-30  # a smaller difference is 0 in float32, and its logarithm infinite


class SourceRun(NamedTuple):
    """One source while its records become samples: how they do, and what is counted and wrong so far.

    Attributes:
        speech: takes the facts of recordings as codes; None for other sources.
    """

    source: Source
    settings: TokenizationSettings
    counts: RecordCounts
    problems: SourceProblems
    speech: SpeechIndex | None = None


def encoder_of(kind: str) -> BlockEncoder:
    """Return what encodes a block of records of a kind: it yields each sample with the line of its record, adds to the
    counts, and adds the records that cannot be used to the problems."""
    if kind == "text":
        return _encode_texts
    if kind == TOKEN_IDS:
        return encode_token_ids
    if kind == ALIGNED_UNITS:
        return encode_aligned_units
    if kind == CODES:
        return encode_speech
    return _encode_preferences if kind in BRANCHED_KINDS else _encode_conversations


def _encode_texts(block: list[NumberedRecord], recordings: Recordings, run: SourceRun) -> Iterator[tuple[int, Sample]]:
    """Encode plain texts. Every token is a target: labels are shifted before a long text is cut."""
    del recordings
    source, settings, counts, problems, _ = run
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
    block: list[NumberedRecord], recordings: Recordings, run: SourceRun
) -> Iterator[tuple[int, Sample]]:
    """Encode dialogues; what is too long is dropped, shortened or refused, as `over_length` says."""
    source, settings, counts, problems, _ = run
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
    block: list[NumberedRecord], recordings: Recordings, run: SourceRun
) -> Iterator[tuple[int, Sample]]:
    """Encode pairs, and answers with a verdict, whose answer to another prompt is cut where it does not fit; their
    prompts lose their oldest rounds first."""
    source, settings, counts, problems, _ = run
    cut_at = settings.max_seq_len if source.kind in VERDICT_KINDS else None
    layout = PairLayout(cut_at, settings.scored, settings.pair_window)
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
            full_sample, prompt = _pair(pair, ids, record, recordings, settings.template, layout)
            sample, prompt = _truncate_prompt(record, full_sample, prompt, recordings, settings, layout)
        except MalformedError as error:
            problems.add(RecordProblem(str(source.path), line, error.field, error.expected, error.got, error.effect))
            continue
        except TemplateRefusedError as error:
            problems.add(_refused_problem(source, line, error))
            continue
        if _fits(sample, prompt, settings):
            counts.truncated += sample is not full_sample
            counts.repeated_prompts += len(sample.documents)
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
    layout: PairLayout,
) -> tuple[Sample, int]:
    """Return the sample of a rendered pair, with its recordings, and the tokens of its prompt; see `assemble_pair`."""
    clips = clips_of(record)
    sample, prompt = assemble_pair(pair, recordings.expand(ids, clips), template, record.score_difference, layout)
    return recordings.with_clips(sample, clips * (1 + len(sample.documents))), prompt


def _prompt_fits(prompt: int, settings: TokenizationSettings) -> bool:
    return settings.max_prompt_len is None or prompt <= settings.max_prompt_len


def _fits(sample: Sample, prompt: int, settings: TokenizationSettings) -> bool:
    return _prompt_fits(prompt, settings) and len(sample.input_ids) <= settings.max_seq_len


def _truncate_prompt(
    record: Preference,
    sample: Sample,
    prompt: int,
    recordings: Recordings,
    settings: TokenizationSettings,
    layout: PairLayout,
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
        return _pair(pair, encoded, shorter, recordings, template, layout)

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
    if sample.documents:
        expected += ", the prompt twice (longer than a window of the model's attention)"
    return RecordProblem(str(source.path), line, "length", expected, f"{len(sample.input_ids):,}", Effect.STOP)


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

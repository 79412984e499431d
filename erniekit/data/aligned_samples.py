"""Turn recordings with aligned words into what an epoch draws its samples from: tokens of units and of each word.

A segment's text is the words joined by spaces, encoded as one text. Its tokens are put together of those of its words:
the first as it is encoded alone, the others as they are encoded behind another word. That this gives the tokens of the
joined text is compared for the whole text and for its second half; a record for which it does not is a problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from erniekit.data.formats.problems import Effect, MalformedError, NothingToTrainError, RecordProblem
from erniekit.data.interleave import Interleaving, longest_sample, segment_counts
from erniekit.data.placeholders import Recordings
from erniekit.data.templates.ernie import Sample
from erniekit.data.tokenizers.breaks import BREAK
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.data.units import AlignedUnits
from erniekit.data.word_borders import PlacedWord, place_words

if TYPE_CHECKING:
    from erniekit.data.encode import SourceRun
    from erniekit.data.tokenize import NumberedRecord

MIN_WORDS = 3  # of a sample, as in USDM
TOLERANCE_UNITS = 2.0  # by which a recording and its units may differ in length: of encoders with wide windows
TOLERANCE = 0.1  # and the same in proportion
_BEFORE = "a"  # any word that a tokenizer keeps apart from the next


class _WordTokens(NamedTuple):
    """The tokens of a word at the beginning of a text, and behind another word; None: they cannot be told apart."""

    alone: list[int]
    behind: list[int] | None


def encode_aligned_units(
    block: list[NumberedRecord], recordings: Recordings, run: SourceRun
) -> Iterator[tuple[int, Sample]]:
    """Yield for each record the tokens of its units and words, with its line; see `interleave.InterleavedSource`."""
    del recordings
    source, settings, counts, problems, _ = run
    tokenizer, interleaving = settings.tokenizer, settings.drawing
    assert isinstance(interleaving, Interleaving), "the run has sources of aligned units"
    placed: list[tuple[int, AlignedUnits, list[PlacedWord]]] = []
    for line, record in block:
        assert isinstance(record, AlignedUnits)
        try:
            placed.append((line, record, _placed(record, interleaving)))
        except MalformedError as error:
            problems.add(RecordProblem(str(source.path), line, error.field, error.expected, error.got, error.effect))
    texts = [[tokenizer.answer_text(word.text) for word in words] for _, _, words in placed]
    known = _word_tokens(tokenizer, chain.from_iterable(texts))
    wholes = tokenizer.encode_batch([_text(tokenizer, words) for _, _, words in placed])
    halves = tokenizer.encode_batch([_text(tokenizer, words[len(words) // 2 :]) for _, _, words in placed])
    for (line, record, words), own, whole, half in zip(placed, texts, wholes, halves, strict=True):
        counts.plain_control += any(BREAK in text for text in own)
        tokens = [known[text] for text in own]
        try:
            if _joined(tokens) != whole or _joined(tokens[len(own) // 2 :]) != half:
                expected = "words that the tokenizer encodes alike alone and together, joined by spaces"
                raise MalformedError("words", expected, "others")
            if not whole:
                raise NothingToTrainError("words", "text that leaves a token", "none: the tokenizer drops every word")
            sample = _sample(record, words, tokens, interleaving)
            fits = _fits(sample, len(record.units), settings.over_length, interleaving)
        except MalformedError as error:
            problems.add(RecordProblem(str(source.path), line, error.field, error.expected, error.got, error.effect))
            continue
        counts.dropped += not fits
        if fits:
            yield line, sample


def _placed(record: AlignedUnits, interleaving: Interleaving) -> list[PlacedWord]:
    """Return the words of a record on its units.

    Raises:
        MalformedError: the units, their rate or the times do not fit the settings or each other.
    """
    rate, count, size = interleaving.units_per_second, len(record.units), len(interleaving.tokens.ids)
    if (largest := max(record.units)) >= size:
        expected = f"units from 0 to {size - 1:,}, for which the tokenizer has tokens {interleaving.tokens.unit_token}"
        raise MalformedError(f"units[{record.units.index(largest)}]", expected, f"{largest:,}")
    if record.units_per_second is not None and record.units_per_second != rate:
        expected = f"{rate:g}, the parameter units_per_second"
        raise MalformedError("units_per_second", expected, f"{record.units_per_second:g}")
    last = record.words[-1].end
    duration = record.duration
    if duration is None:
        duration, slack = count / rate, TOLERANCE_UNITS / rate
    else:
        slack = 1 / rate
        if abs(duration * rate - count) > max(TOLERANCE_UNITS, TOLERANCE * count):
            expected = f"about {count / rate:.2f} s, of {count:,} units at {rate:g} a second (units_per_second)"
            raise MalformedError("duration", expected, f"{duration:g}")
    if last > duration + slack:
        expected = f"times up to {duration:.2f} s, the end of the {count:,} units"
        raise MalformedError("words", expected, f"a word that ends at {last:g} s")
    words = [word._replace(start=min(word.start, duration), end=min(word.end, duration)) for word in record.words]
    placed = place_words(words, duration, count)
    if len(placed) < MIN_WORDS:
        expected = f"at least {MIN_WORDS} words with units of their own"
        raise NothingToTrainError("words", expected, f"{len(placed)}")
    return placed


def _text(tokenizer: Tokenizer, words: Sequence[PlacedWord]) -> str:
    return tokenizer.answer_text(" ".join(word.text for word in words))


def _word_tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, _WordTokens]:
    distinct = list(dict.fromkeys(texts))
    alone = tokenizer.encode_batch(distinct)
    before = tokenizer.encode(_BEFORE)
    both = tokenizer.encode_batch([f"{_BEFORE} {text}" for text in distinct])
    return {
        text: _WordTokens(own, ids[len(before) :] if ids[: len(before)] == before else None)
        for text, own, ids in zip(distinct, alone, both, strict=True)
    }


def _joined(words: list[_WordTokens]) -> list[int] | None:
    """Return the tokens of words joined by spaces."""
    if any(word.behind is None for word in words):
        return None
    return [*words[0].alone, *chain.from_iterable(word.behind or () for word in words[1:])]


def _sample(
    record: AlignedUnits, words: list[PlacedWord], tokens: list[_WordTokens], interleaving: Interleaving
) -> Sample:
    units = np.array(interleaving.tokens.ids, np.int32)[np.array(record.units)]
    behind = list(chain.from_iterable(word.behind or () for word in tokens))
    alone = list(chain.from_iterable(word.alone for word in tokens))
    ids = np.concatenate((units, np.array(behind, np.int32), np.array(alone, np.int32)))
    table = [(word.end, len(own.behind or ()), len(own.alone)) for word, own in zip(words, tokens, strict=True)]
    return Sample(ids, ids[:0], words=np.array(table, np.int32))


def _fits(sample: Sample, num_units: int, over_length: str, interleaving: Interleaving) -> bool:
    """Return whether a record can fit `max_seq_len` in any epoch.

    Raises:
        MalformedError: it may not fit, and `over_length` is "error".
    """
    assert sample.words is not None
    ends, behind, alone = sample.words.T
    has_bos, limit = interleaving.bos_id is not None, interleaving.max_seq_len
    if over_length == "error":
        parts = np.minimum(segment_counts(np.array([num_units]), interleaving.segment_units), len(ends))
        texts = np.array([np.maximum(behind, alone).sum()])
        longest = int(longest_sample(np.array([num_units]), texts, parts, has_bos)[0])
        if longest > limit:
            raise _TooLongError("length", f"at most {limit:,} tokens (max_seq_len) in any epoch", f"up to {longest:,}")
    shortest = int(has_bos) + int(np.minimum(np.diff(ends, prepend=0), np.minimum(behind, alone)).sum())
    return over_length != "drop" or shortest <= limit


class _TooLongError(MalformedError):
    effect = Effect.STOP

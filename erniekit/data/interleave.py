"""Interleave the units and the text of recordings, drawn anew for each (seed, epoch, sample).

The method is that of USDM (Kim et al., 2024, arXiv:2402.05706; naver-ai/usdm, preprocess/pre-training/stage2.py):

1. A recording of N units has K = N // (units of a segment) + 1 parts. Border k of 1..K-1 is drawn from a normal
   distribution with mean k N/K and deviation N/(2K), truncated at k N/K +- N/K, and moves to the nearest border between
   two words, of two equally near ones to the earlier. Borders that fall together, or to an end, are one: so there may
   be fewer segments than K.
2. Each segment is text with `text_probability`, else units. With `correspond_probability` the correspond mark and the
   same words in the other kind follow.
3. The continue mark stands before a segment whose kind is not that of the tokens before it.
4. The sample is BOS, the segments and EOS; every token is a target.

Truncated normals are drawn by the inverse of their cumulative distribution (`statistics.NormalDist`). Sample i takes
3 K_i - 1 uniform numbers of the stream of its epoch: one for each border, then two for each segment, its kind and
whether it is followed by the other. So the place in the stream is known before anything is drawn, and a sample drawn
alone is the one drawn with all others.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from erniekit.data.drawing import MAX_CACHED_EPOCHS, EpochLengths
from erniekit.data.mixing import Purpose, generator
from erniekit.data.templates.ernie import Sample
from erniekit.data.token_cache import TokenArrays
from erniekit.data.unit_tokens import UnitTokens
from erniekit.data.units import ALIGNED_UNITS

if TYPE_CHECKING:
    from erniekit.data.code_reader import CodeReader

INTERLEAVE_VERSION = 1  # raise it when the same draws give other samples: then runs are not resumed
BLOCK_WORDS = 1_000_000  # whose borders are in memory at once, about 100 bytes each
_TRUNCATION = 2.0  # deviations: N/K is twice N/(2K)


@dataclass(frozen=True, slots=True)
class Interleaving:
    """How recordings with aligned words become samples.

    Attributes:
        tokens: of the units and the marks.
        units_per_second: the rate of the units.
        segment_units: the units of a segment, about which segments have; at least 1.
        text_probability, correspond_probability: see the module.
        seed: of the draws.
        bos_id, eos_id: of the tokens around the segments; the first may be None: the model has no such token.
        max_seq_len: the longest sample, in positions.
        truncates: whether a sample that is longer loses its oldest segments; otherwise it is left out of the epoch.
    """

    tokens: UnitTokens
    units_per_second: float
    segment_units: float
    text_probability: float
    correspond_probability: float
    seed: int
    bos_id: int | None
    eos_id: int
    max_seq_len: int
    truncates: bool

    @property
    def kind(self) -> str:
        return ALIGNED_UNITS

    @property
    def levels(self) -> int:
        return 0

    @property
    def arrays(self) -> tuple[str, ...]:
        return ()

    @property
    def fingerprint(self) -> tuple:
        """What determines the samples of an epoch, beside what the token cache holds."""
        marks = self.tokens.continue_id, self.tokens.correspond_id
        draws = self.segment_units, self.text_probability, self.correspond_probability, self.seed
        return INTERLEAVE_VERSION, *marks, *draws

    def stored(self) -> list:
        """Return it as JSON, without the ids of units: who is sent only the lengths of samples needs none."""
        return [list(astuple(replace(self.tokens, ids=()))), *astuple(self)[1:]]

    @classmethod
    def of(cls, stored: list) -> Interleaving:
        """Return what `stored` gave."""
        return cls(UnitTokens(tuple(stored[0][0]), *stored[0][1:]), *stored[1:])

    def source(self, arrays: TokenArrays, number: int, reader: CodeReader | None) -> InterleavedSource:
        """Return the samples of a source; see `Drawing`."""
        del reader
        return InterleavedSource(arrays, self, number)

    def key(self, over_length: str) -> tuple:
        """Return what determines what the token cache holds; segments only decide which record is too long."""
        judged_by = (self.segment_units,) if over_length == "error" else ()
        return self.tokens.unit_token, self.units_per_second, *judged_by


class Segments(NamedTuple):
    """The segments of some samples in order; each array has an item for each segment.

    Attributes:
        sample: of which it is one.
        first, stop: its words are first <= word < stop, counted over all samples.
        begin, end: its units, counted in its sample.
        is_text: its kind; else it is units.
        corresponds: whether the same words follow in the other kind.
        continues: whether the continue mark stands before it.
        tokens: with its marks.
    """

    sample: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    is_text: np.ndarray
    corresponds: np.ndarray
    continues: np.ndarray
    tokens: np.ndarray


class InterleavedSource:
    """The samples of a source of aligned units, in each epoch others.

    In `arrays` a sample has the tokens of its units, then those of each word behind another word, then those of each
    word at the beginning of a text; and for each word (unit at which it ends, tokens behind another, tokens at the
    beginning).

    Args:
        number: of the source, which makes its stream of draws.
    """

    def __init__(self, arrays: TokenArrays, settings: Interleaving, number: int) -> None:
        self._arrays, self._settings, self._number = arrays, settings, number
        self._words = arrays.words.reshape(-1, 3)
        self._offsets = arrays.word_offsets // 3
        self._epochs: OrderedDict[int, EpochLengths] = OrderedDict()

    def lengths(self, epoch: int) -> EpochLengths:
        """Return the lengths of all samples in an epoch: 10,000 of ten seconds take 0.05 s. Two epochs are kept."""
        known = self._epochs.get(epoch)
        if known is None:
            known = self._draw_lengths(epoch)
            self._epochs[epoch] = known
            while len(self._epochs) > MAX_CACHED_EPOCHS:
                self._epochs.popitem(last=False)
        return known

    def sample(self, index: int, epoch: int) -> Sample:
        """Return a sample as it is in an epoch; it has no position if it is left out."""
        stored = self._arrays.sample(index).input_ids
        words, segments = self._segments(index, index + 1, epoch)
        kept = _first_kept(segments, 1, self._settings)[0]
        if kept == len(segments.sample):
            return Sample(stored[:0], stored[:0])
        tokens = np.concatenate(list(self._pieces(stored, words, segments, kept)))
        return Sample(tokens[:-1], tokens[1:])

    @cached_property
    def longest(self) -> np.ndarray:
        """int64[n], the positions that each sample has at most in any epoch."""
        offsets, words = self._offsets, self._words
        ends = words[offsets[1:] - 1, 0].astype(np.int64)
        texts = np.add.reduceat(np.maximum(words[:, 1], words[:, 2]), offsets[:-1], dtype=np.int64)
        parts = np.minimum(segment_counts(ends, self._settings.segment_units), np.diff(offsets))
        longest = longest_sample(ends, texts, parts, self._settings.bos_id is not None)
        return np.minimum(longest, self._settings.max_seq_len)

    @cached_property
    def _first_draws(self) -> np.ndarray:
        """int64[n + 1], where the draws of each sample begin in the stream of an epoch."""
        ends = self._words[self._offsets[1:] - 1, 0].astype(np.int64)
        return np.concatenate(([0], np.cumsum(3 * segment_counts(ends, self._settings.segment_units) - 1)))

    def _draw_lengths(self, epoch: int) -> EpochLengths:
        for file in self._arrays.files:
            file.refuse_truncated()
        offsets = self._offsets
        count = len(offsets) - 1
        positions = np.zeros(count, np.int32)
        shortened = start = 0
        while start < count:
            stop = max(start + 1, int(np.searchsorted(offsets, offsets[start] + BLOCK_WORDS, side="right")) - 1)
            _, segments = self._segments(start, stop, epoch)
            positions[start:stop], cut = _positions(segments, stop - start, self._settings)
            shortened += cut
            start = stop
        return EpochLengths(positions, int(np.count_nonzero(positions == 0)), shortened)

    def _segments(self, start: int, stop: int, epoch: int) -> tuple[np.ndarray, Segments]:
        """Return the words of samples start <= i < stop, and their segments in an epoch."""
        offsets = self._offsets[start : stop + 1]
        words = np.asarray(self._words[offsets[0] : offsets[-1]], np.int64)
        first, last = int(self._first_draws[start]), int(self._first_draws[stop])
        rng = generator(Purpose.SEGMENTS, self._settings.seed, epoch, self._number)
        cast(np.random.PCG64, rng.bit_generator).advance(first)
        return words, draw_segments(words, offsets - offsets[0], rng.random(last - first), self._settings)

    def _pieces(self, stored: np.ndarray, words: np.ndarray, segments: Segments, kept: int) -> list[np.ndarray]:
        """Return the tokens of a sample from segment `kept` on, as arrays to be joined."""
        marks = self._settings.tokens
        behind = np.concatenate(([0], np.cumsum(words[:, 1]))) + words[-1, 0]
        alone = np.concatenate(([0], np.cumsum(words[:, 2]))) + behind[-1]
        pieces = [] if self._settings.bos_id is None else [np.array([self._settings.bos_id], np.int32)]
        for number in range(kept, len(segments.sample)):
            first, stop = segments.first[number], segments.stop[number]
            units = [stored[segments.begin[number] : segments.end[number]]]
            text = [stored[alone[first] : alone[first + 1]], stored[behind[first + 1] : behind[stop]]]
            this, other = (text, units) if segments.is_text[number] else (units, text)
            if segments.continues[number] and number > kept:
                pieces.append(np.array([marks.continue_id], np.int32))
            pieces += this
            if segments.corresponds[number]:
                pieces += [np.array([marks.correspond_id], np.int32), *other]
        return [*pieces, np.array([self._settings.eos_id], np.int32)]


def segment_counts(num_units: np.ndarray, segment_units: float) -> np.ndarray:
    """Return how many segments recordings of so many units are cut into: int64, at least 1."""
    return (num_units // segment_units).astype(np.int64) + 1


def longest_sample(num_units: np.ndarray, texts: np.ndarray, parts: np.ndarray, has_bos: bool) -> np.ndarray:
    """Return the positions of samples in which every segment is there in both kinds, with all marks.

    Args:
        texts: the tokens of each text at most.
        parts: the number of segments at most.
    """
    return int(has_bos) + num_units + texts + 2 * parts - 1


def truncated_normal(uniform: np.ndarray) -> np.ndarray:
    """Return what uniform numbers of [0, 1) are in the standard normal distribution, truncated at +-2 deviations."""
    normal = NormalDist()
    low, high = normal.cdf(-_TRUNCATION), normal.cdf(_TRUNCATION)
    return np.array([normal.inv_cdf(low + value * (high - low)) for value in uniform.tolist()])


def draw_segments(words: np.ndarray, offsets: np.ndarray, uniform: np.ndarray, settings: Interleaving) -> Segments:
    """Cut samples into segments and choose their kinds.

    Args:
        words: int64[w, 3], of all samples, as InterleavedSource has them.
        offsets: int64[n + 1]; the words of sample i are offsets[i] <= word < offsets[i + 1], one at least.
        uniform: float64, the draws of all samples in order.
    """
    samples = np.arange(len(offsets) - 1)
    count = np.diff(offsets)
    # The borders of sample i are 0 and the ends of its words; they begin at own[i]. `keys` grow over all samples.
    own = offsets[:-1] + samples
    borders = np.zeros(len(words) + len(samples), np.int64)
    borders[np.arange(len(words)) + np.repeat(samples, count) + 1] = words[:, 0]
    num_units = borders[own + count]
    base = np.cumsum(num_units + 1) - (num_units + 1)
    keys = borders + np.repeat(base, count + 1)
    parts = segment_counts(num_units, settings.segment_units)
    draws = np.cumsum(3 * parts - 1) - (3 * parts - 1)

    of = np.repeat(samples, parts - 1)
    number = np.arange(len(of)) - np.repeat(np.cumsum(parts - 1) - (parts - 1), parts - 1) + 1
    mean, deviation = num_units[of] / parts[of] * number, num_units[of] / (parts[of] * 2)
    place = mean + deviation * truncated_normal(uniform[draws[of] + number - 1])
    place = np.clip(place, 0, num_units[of])
    before = np.searchsorted(keys, base[of] + np.floor(place).astype(np.int64), side="right") - 1
    after = np.minimum(before + 1, own[of] + count[of])
    nearest = np.where(borders[after] - place < place - borders[before], after, before)

    starts = np.unique(np.concatenate((own, nearest)))
    sample = np.searchsorted(own, starts, side="right") - 1
    inside = starts < own[sample] + count[sample]
    starts, sample = starts[inside], sample[inside]
    first = starts - sample
    stop = np.append(first[1:], len(words))
    begin, end = borders[starts], words[stop - 1, 0]
    rank = np.arange(len(starts)) - np.searchsorted(sample, sample, side="left")
    kind_draw = draws[sample] + parts[sample] - 1 + 2 * rank
    is_text = uniform[kind_draw] >= 1 - settings.text_probability
    corresponds = uniform[kind_draw + 1] >= 1 - settings.correspond_probability
    ends_as_text = is_text ^ corresponds
    continues = (rank > 0) & (np.append(False, ends_as_text[:-1]) != is_text)

    behind = np.concatenate(([0], np.cumsum(words[:, 1])))
    text_tokens = words[first, 2] + behind[stop] - behind[first + 1]
    unit_tokens = end - begin
    this, other = np.where(is_text, (text_tokens, unit_tokens), (unit_tokens, text_tokens))
    tokens = continues + this + corresponds * (1 + other)
    return Segments(sample, first, stop, begin, end, is_text, corresponds, continues, tokens)


def _first_kept(segments: Segments, count: int, settings: Interleaving) -> np.ndarray:
    """Return for each of `count` samples the segment that it begins with; that behind its last one leaves it out."""
    first = np.searchsorted(segments.sample, np.arange(count), side="left")
    after = np.append(first[1:], len(segments.sample))
    fits = (_positions_from(segments, settings) <= settings.max_seq_len).astype(np.int64)
    if settings.truncates:  # the fewer segments, the shorter
        return after - np.add.reduceat(fits, first)
    return np.where(fits[first], first, after)


def _positions_from(segments: Segments, settings: Interleaving) -> np.ndarray:
    """Return the positions of the sample that begins with each segment, and has all those after it."""
    total = np.cumsum(segments.tokens)
    after = np.searchsorted(segments.sample, segments.sample, side="right") - 1
    return int(settings.bos_id is not None) + total[after] - total + segments.tokens - segments.continues


def _positions(segments: Segments, count: int, settings: Interleaving) -> tuple[np.ndarray, int]:
    """Return the positions of each sample, and how many samples lost segments."""
    kept = _first_kept(segments, count, settings)
    first = np.searchsorted(segments.sample, np.arange(count), side="left")
    after = np.append(first[1:], len(segments.sample))
    there = kept < after
    positions = np.where(there, _positions_from(segments, settings)[np.minimum(kept, after - 1)], 0)
    return positions, int(np.count_nonzero(there & (kept > first)))

"""Draw samples of masked codes anew for each (seed, epoch, source, recording).

The method is OmniVoice's (k2-fsa/OmniVoice, `OmniVoiceSampleProcessor`), number for number: a sample is a style text,
the text that is said, and the frames, of whose codes a part is masked; a beginning of the frames may stay as it is. Of
the 16 uniform numbers u0.. of a recording these are used, and comparisons are strict:

| number | decides |
|---|---|
| u0 | no condition if below `condition_dropout`: then neither text nor unmasked beginning |
| u1 | the unmasked beginning's share of the frames, between the two numbers of `prompt_ratio` |
| u2, u3 | whether the language, whether the instruct is told; else both are "None" |
| u4 | no unmasked beginning if the instruct is told and this is below `only_instruct` |
| u5 | the share of codes that are masked, between the two numbers of `mask_ratio` |
| u6 | the text in pinyin, where there is one |

A recording whose frames begin with a noisy prompt keeps its condition, says so with a mark, and is masked behind that
prompt. Code t of level c is masked if number c T + t of the recording's C T further ones is below the share.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from erniekit.data.drawing import CHOICES, MAX_CACHED_EPOCHS, EpochLengths, SpokenFacts, lengths_by_blocks, tuples_of
from erniekit.data.mixing import Purpose, uniforms
from erniekit.data.templates.ernie import IGNORE_INDEX, Sample

if TYPE_CHECKING:
    from erniekit.data.code_reader import CodeReader
    from erniekit.data.token_cache import TokenArrays

MASKED_CODES_VERSION = 1  # raise it when the same draws give other samples: then runs are not resumed


class StyleTokens(NamedTuple):
    """The token ids of the pieces of a style text, and of the word "None"."""

    denoise: tuple[int, ...]
    lang_start: tuple[int, ...]
    lang_end: tuple[int, ...]
    instruct_start: tuple[int, ...]
    instruct_end: tuple[int, ...]
    text_start: tuple[int, ...]
    text_end: tuple[int, ...]
    none: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MaskedCodes:
    """How recordings become samples of masked codes.

    Attributes:
        levels: C.
        codebook_size: codes of a level.
        mask_id: the last row of a level's table, behind its codes, which stands for a masked one.
        frame_rate: frames a second.
        seed: of the draws.
        mask_ratio, prompt_ratio, condition_dropout, language, instruct, only_instruct, pinyin: see the module.
        tokens: those of `StyleTokens`.
        max_seq_len: the longest sample, in positions; a longer one is left out of the epoch.
    """

    levels: int
    codebook_size: int
    mask_id: int
    frame_rate: float
    seed: int
    mask_ratio: tuple[float, float]
    prompt_ratio: tuple[float, float]
    condition_dropout: float
    language: float
    instruct: float
    only_instruct: float
    pinyin: float
    tokens: tuple[tuple[int, ...], ...]
    max_seq_len: int

    kind: ClassVar[str] = "codes"
    arrays: ClassVar[tuple[str, ...]] = ("codes", "code_labels")

    @property
    def fingerprint(self) -> tuple:
        """What determines the samples of an epoch, beside what the token cache holds."""
        return MASKED_CODES_VERSION, *astuple(self)

    def stored(self) -> list:
        """Return it as JSON."""
        return list(astuple(self))

    @classmethod
    def of(cls, stored: list) -> MaskedCodes:
        """Return what `stored` gave."""
        return cls(*tuples_of(stored))

    def source(self, arrays: TokenArrays, number: int, reader: CodeReader | None) -> MaskedCodesSource:
        """Return the samples of a source; see `Drawing`."""
        return MaskedCodesSource(arrays, self, number, reader)


class MaskedDraws(NamedTuple):
    """What is drawn for n recordings, apart from which codes are masked.

    Attributes:
        drop: bool[n], no condition.
        tells_language, tells_instruct, says_pinyin: bool[n].
        prompt: int64[n], the frames of the unmasked beginning.
        mask_ratio: float64[n].
    """

    drop: np.ndarray
    tells_language: np.ndarray
    tells_instruct: np.ndarray
    says_pinyin: np.ndarray
    prompt: np.ndarray
    mask_ratio: np.ndarray


def draw_choices(uniform: np.ndarray, facts: SpokenFacts, settings: MaskedCodes) -> MaskedDraws:
    """Return what the numbers float64[n, 16] of n recordings decide."""
    drop, prompt, language, instruct, only_instruct, ratio, pinyin = uniform.T[:7]
    is_denoised = facts.clean_start >= 0
    dropped = ~is_denoised & (drop < settings.condition_dropout)
    tells_instruct = ~dropped & (instruct < settings.instruct)
    low, high = settings.prompt_ratio
    share = np.where(
        dropped | (tells_instruct & (only_instruct < settings.only_instruct)), 0.0, low + (high - low) * prompt
    )
    low, high = settings.mask_ratio
    return MaskedDraws(
        dropped,
        ~dropped & (language < settings.language),
        tells_instruct,
        (facts.pinyin > 0) & (pinyin < settings.pinyin),
        np.where(is_denoised, facts.clean_start, (facts.frames * share).astype(np.int64)),
        low + (high - low) * ratio,
    )


class MaskedCodesSource:
    """The samples of a source of recordings as codes, in each epoch with other masks.

    Args:
        number: of the source, which makes its streams of draws.
        reader: of codes and texts; None where only lengths are asked for.
    """

    def __init__(self, arrays: TokenArrays, settings: MaskedCodes, number: int, reader: CodeReader | None) -> None:
        self._facts = SpokenFacts.of(arrays.spoken)
        self._settings, self._number, self._reader = settings, number, reader
        self._tokens = StyleTokens(*settings.tokens)
        self._lengths = lru_cache(MAX_CACHED_EPOCHS)(self._draw_lengths)

    def lengths(self, epoch: int) -> EpochLengths:
        """Return the lengths of all samples in an epoch. Two epochs are kept."""
        return self._lengths(epoch)

    @cached_property
    def longest(self) -> np.ndarray:
        """int64[n], the positions that each sample has at most in any epoch."""
        facts = self._facts
        language = np.maximum(facts.language, len(self._tokens.none))
        instruct = np.maximum(facts.instruct, len(self._tokens.none))
        text = np.maximum(facts.text, facts.pinyin)
        longest = self._marks + language + instruct + text + facts.frames
        return np.minimum(longest, self._settings.max_seq_len)

    def sample(self, index: int, epoch: int) -> Sample:
        """Return a sample as it is in an epoch; it has no position if it is longer than `max_seq_len`."""
        assert self._reader is not None, "this rank plans, and reads no codes"
        draws = self._draws(index, index + 1, epoch)
        settings = self._settings
        if self._positions(draws, index, index + 1)[0] > settings.max_seq_len:
            return Sample(np.empty(0, np.int32), np.empty(0, np.int32))
        codes = self._reader.codes(index)
        levels, frames = codes.shape
        first = int(self._first_masks[index])
        uniform = uniforms(Purpose.CODE_MASKS, settings.seed, epoch, self._number, first, codes.size)
        masked = uniform.reshape(codes.shape) < draws.mask_ratio[0]
        masked[:, : int(draws.prompt[0])] = False
        ids = [] if draws.drop[0] else self._text(index, draws)
        length = len(ids) + frames
        first_rows = np.arange(levels)[:, None] * (settings.mask_id + 1)
        rows = np.full((length, levels), -1, np.int64)
        rows[len(ids) :] = (np.where(masked, settings.mask_id, codes) + first_rows).T
        labels = np.full((length, levels), IGNORE_INDEX, np.int64)
        labels[len(ids) :] = np.where(masked, codes, IGNORE_INDEX).T
        input_ids = np.zeros(length, np.int32)
        input_ids[: len(ids)] = ids
        return Sample(
            input_ids,
            np.full(length, IGNORE_INDEX, np.int32),
            arrays={"codes": rows, "code_labels": labels},
            causal=False,
            seconds=frames / settings.frame_rate,
        )

    def _text(self, index: int, draws: MaskedDraws) -> list[int]:
        """Return the ids of the style text and of what is said."""
        assert self._reader is not None
        tokens = self._tokens
        text, pinyin, language, instruct = self._reader.texts(index)
        told_language = language if draws.tells_language[0] and len(language) else tokens.none
        told_instruct = instruct if draws.tells_instruct[0] and len(instruct) else tokens.none
        denoise = tokens.denoise if self._facts.clean_start[index] >= 0 else ()
        return [
            *denoise, *tokens.lang_start, *told_language, *tokens.lang_end,
            *tokens.instruct_start, *told_instruct, *tokens.instruct_end,
            *tokens.text_start, *(pinyin if draws.says_pinyin[0] else text), *tokens.text_end,
        ]  # fmt: skip

    @cached_property
    def _marks(self) -> np.ndarray:
        """int64[n], the tokens of a sample that are neither text, language nor instruct."""
        always = sum(map(len, self._tokens)) - len(self._tokens.none) - len(self._tokens.denoise)
        return always + len(self._tokens.denoise) * (self._facts.clean_start >= 0)

    @cached_property
    def _first_masks(self) -> np.ndarray:
        """int64[n + 1], where the numbers of each recording's codes begin in the stream of an epoch."""
        return np.concatenate(([0], np.cumsum(self._facts.frames * self._settings.levels)))

    def _draws(self, start: int, stop: int, epoch: int) -> MaskedDraws:
        """Draw for recordings start <= i < stop."""
        first, count = CHOICES * start, CHOICES * (stop - start)
        uniform = uniforms(Purpose.CODE_CHOICES, self._settings.seed, epoch, self._number, first, count)
        facts = SpokenFacts(*(values[start:stop] for values in self._facts))
        return draw_choices(uniform.reshape(-1, CHOICES), facts, self._settings)

    def _positions(self, draws: MaskedDraws, start: int, stop: int) -> np.ndarray:
        """Return the positions of samples start <= i < stop: int64."""
        facts = SpokenFacts(*(values[start:stop] for values in self._facts))
        none = len(self._tokens.none)
        language = np.where(draws.tells_language & (facts.language > 0), facts.language, none)
        instruct = np.where(draws.tells_instruct & (facts.instruct > 0), facts.instruct, none)
        text = np.where(draws.says_pinyin, facts.pinyin, facts.text)
        return facts.frames + ~draws.drop * (self._marks[start:stop] + language + instruct + text)

    def _draw_lengths(self, epoch: int) -> EpochLengths:
        def positions(start: int, stop: int) -> np.ndarray:
            return self._positions(self._draws(start, stop, epoch), start, stop)

        return lengths_by_blocks(len(self._facts.frames), positions, self._settings.max_seq_len)

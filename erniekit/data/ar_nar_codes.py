"""Draw samples of speech that is written level by level anew for each (seed, epoch, source, recording).

The sequence is that of VALL-E (Wang et al., 2023, arXiv:2301.02111) as e-c-k-e-r/vall-e writes it; a segment that is
not there takes its separator along:

    text  sep  language  sep  level  sep  [prompt frames [task]]  sep  response

A sample trains one level. Level 0 is written code by code (AR): a frame reads its code of level 0, the separator before
the response predicts the first one, and the last frame predicts the stop code. Level l above it is written at once
(NAR): a frame reads the sum of its codes below l, and predicts its own code of level l. Prompt frames read the sum of
their codes below max(1, l). A continuation has two utterances of a speaker, the text of both and all of the first as
its prompt. A transcript (task "stt") is the response first, each frame with the codes of all levels but the last, and
then the text, which is predicted.

Of the 16 uniform numbers u0.. of a recording these are used:

| number | decides |
|---|---|
| u0 | the task |
| u1 | the level |
| u2 | the prompt's length, between the two numbers of `prompt_seconds` |
| u3 | where the prompt comes from: the speaker, the most similar utterance, or the utterance itself |
| u4 | neither text nor prompt if below `condition_dropout` |
| u5 | no prompt if below `prompt_dropout` |
| u6 | the language if below `language` |
| u7, u8; u9, u10; .. u14 | of up to four utterances of a prompt: which one, and where it begins |
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from erniekit.data.batch import CodePart
from erniekit.data.code_prompts import Prompts, SpeakerIndex, draw_prompts
from erniekit.data.code_segments import Assembly, Segment, of_frames, of_tokens
from erniekit.data.drawing import (
    CHOICES,
    MAX_CACHED_EPOCHS,
    EpochLengths,
    SpokenFacts,
    lengths_by_blocks,
    tuples_of,
)
from erniekit.data.mixing import Purpose, uniforms
from erniekit.data.templates.ernie import Sample

if TYPE_CHECKING:
    from erniekit.data.code_reader import CodeReader
    from erniekit.data.token_cache import TokenArrays

AR_NAR_CODES_VERSION = 1  # raise it when the same draws give other samples: then runs are not resumed
TASKS = TTS, CONTINUATION, STT = "tts", "continuation", "stt"


@dataclass(frozen=True, slots=True)
class ArNarCodes:
    """How recordings become samples that are written level by level.

    Attributes:
        levels: L.
        codebook_size: V, codes of a level; the code that ends a response is V.
        frame_rate: frames a second.
        seed: of the draws.
        tasks: words of TASKS, equally likely; one that stands twice is twice as likely.
        level_weights: how likely each level is, relative.
        prompt_seconds, condition_dropout, prompt_dropout, language: see the module.
        prompt_sources: how likely each source of a prompt is, relative: the speaker, the most similar utterance, the
            utterance itself.
        prompt_utterances: how many are joined for a prompt at most, 1 to 4.
        text_loss, prompt_loss: whether samples of level 0 have targets in the text, in the prompt.
        both_ways: whether samples of the levels above 0 are read both ways; otherwise causally.
        restarts_positions: whether positions count from 0 in each segment with its separator; otherwise in the sample.
        separator: the token between segments.
        level_ids: the token of each level.
        task_ids: the tokens of tasks.
        text_ends, language_ends: the tokens around a text, around a language.
        prompt_rows: the first row of the code table of each level of prompts.
        written_row: that of the codes of level 0, which are written one after another.
        whole_rows: that of the codes of each level that the levels above it read.
        max_seq_len: the longest sample, in positions; a longer one is left out of the epoch.
        space: the tokens between the two texts of a continuation.
    """

    levels: int
    codebook_size: int
    frame_rate: float
    seed: int
    tasks: tuple[str, ...]
    level_weights: tuple[float, ...]
    prompt_seconds: tuple[float, float]
    prompt_sources: tuple[float, float, float]
    prompt_utterances: int
    condition_dropout: float
    prompt_dropout: float
    language: float
    text_loss: bool
    prompt_loss: bool
    both_ways: bool
    restarts_positions: bool
    separator: int
    level_ids: tuple[int, ...]
    task_ids: tuple[tuple[str, int], ...]
    text_ends: tuple[int, int]
    language_ends: tuple[int, int]
    prompt_rows: tuple[int, ...]
    written_row: int
    whole_rows: tuple[int, ...]
    max_seq_len: int
    space: tuple[int, ...] = ()

    kind: ClassVar[str] = "codes"
    arrays: ClassVar[tuple[str, ...]] = ("codes", "code_labels", "code_part")

    @property
    def fingerprint(self) -> tuple:
        """What determines the samples of an epoch, beside what the token cache holds."""
        return AR_NAR_CODES_VERSION, *astuple(self)

    def stored(self) -> list:
        """Return it as JSON."""
        return list(astuple(self))

    @classmethod
    def of(cls, stored: list) -> ArNarCodes:
        """Return what `stored` gave."""
        return cls(*tuples_of(stored))

    def source(self, arrays: TokenArrays, number: int, reader: CodeReader | None) -> ArNarSource:
        """Return the samples of a source; see `Drawing`."""
        return ArNarSource(arrays, self, number, reader)


class ArNarDraws(NamedTuple):
    """What is drawn for n recordings.

    Attributes:
        task: int64[n], index into TASKS.
        level: int64[n]; 0 for a transcript.
        has_text, tells_language: bool[n].
        response: int64[n], the recording that is said; of a continuation another one than that of the sample.
        prompts: a prompt without frames is not there.
    """

    task: np.ndarray
    level: np.ndarray
    has_text: np.ndarray
    tells_language: np.ndarray
    response: np.ndarray
    prompts: Prompts

    @property
    def continues(self) -> np.ndarray:
        return self.task == TASKS.index(CONTINUATION)

    @property
    def transcribes(self) -> np.ndarray:
        return self.task == TASKS.index(STT)


class ArNarSource:
    """The samples of a source of recordings as codes, in each epoch with other tasks, levels and prompts.

    Args:
        number: of the source, which makes its stream of draws.
        reader: of codes and texts; None where only lengths are asked for.
    """

    def __init__(self, arrays: TokenArrays, settings: ArNarCodes, number: int, reader: CodeReader | None) -> None:
        self._facts = SpokenFacts.of(arrays.spoken)
        self._settings, self._number, self._reader = settings, number, reader
        self._speakers = SpeakerIndex(self._facts.speaker)
        self._similar = None
        if settings.prompt_sources[1] > 0:
            from erniekit.data.speakers import most_similar  # which reads the codes of all recordings

            self._similar = most_similar(arrays, reader)
        self._lengths = lru_cache(MAX_CACHED_EPOCHS)(self._draw_lengths)

    def lengths(self, epoch: int) -> EpochLengths:
        """Return the lengths of all samples in an epoch. Two epochs are kept."""
        return self._lengths(epoch)

    @cached_property
    def longest(self) -> np.ndarray:
        """int64[n], the positions that each sample has at most in any epoch."""
        settings, facts = self._settings, self._facts
        marks = len(settings.text_ends) + len(settings.language_ends) + 6  # level, task and four separators
        longest_prompt = int(settings.prompt_seconds[1] * settings.frame_rate) + 1
        longest = marks + facts.text + facts.language + facts.frames.astype(np.int64) + longest_prompt
        if CONTINUATION in settings.tasks:
            longest += len(settings.space) + facts.text.max(initial=0) + facts.frames.max(initial=0)
        return np.minimum(longest, settings.max_seq_len)

    def sample(self, index: int, epoch: int) -> Sample:
        """Return a sample as it is in an epoch; it has no position if it is longer than `max_seq_len`."""
        draws = self._draws(index, index + 1, epoch)
        if self._positions(draws, index, index + 1)[0] > self._settings.max_seq_len:
            return Sample(np.empty(0, np.int32), np.empty(0, np.int32))
        return self._transcript(index, draws) if draws.transcribes[0] else self._speech(index, draws)

    def _speech(self, index: int, draws: ArNarDraws) -> Sample:
        """Return a sample whose response is predicted."""
        settings, levels = self._settings, self._settings.levels
        level, response = int(draws.level[0]), self._codes(int(draws.response[0]))
        text = self._text(index, draws)
        prompt = self._prompt(draws)
        read = response[:level] if level else response[:1]
        tables = settings.whole_rows[:level] if level else (settings.written_row,)
        segments = [
            of_tokens(text, levels),
            *self._language(index, draws),
            of_tokens([settings.level_ids[level]], levels),
        ]
        if prompt.shape[1]:
            task = [dict(settings.task_ids)[CONTINUATION]] if draws.continues[0] else []
            prompt_frames = of_frames(prompt[: max(1, level)], settings.prompt_rows, levels)
            segments.append(Segment(*map(np.concatenate, zip(prompt_frames, of_tokens(task, levels), strict=True))))
        segments.append(of_frames(read, tables, levels))
        sample = Assembly(segments, settings.separator, restarts_positions=settings.restarts_positions)
        first = sample.starts[-1]
        if level:
            sample.predict_codes(first, response[level], level, CodePart.RESPONSE)
        else:
            ended = np.append(response[0], settings.codebook_size)
            sample.predict_codes(first - 1, ended, 0, CodePart.RESPONSE)
            if settings.text_loss and draws.has_text[0]:
                sample.predict_tokens(0, text[1:], CodePart.TEXT)
            if settings.prompt_loss and prompt.shape[1]:
                sample.predict_codes(sample.starts[-2], prompt[0, 1:], 0, CodePart.PROMPT)
        seconds = (prompt.shape[1] + response.shape[1]) / settings.frame_rate
        return sample.finished(causal=level == 0 or not settings.both_ways, seconds=seconds)

    def _transcript(self, index: int, draws: ArNarDraws) -> Sample:
        """Return a sample whose text is predicted."""
        settings, levels = self._settings, self._settings.levels
        codes = self._codes(index)
        read = codes[: max(1, settings.levels - 1)]
        text = self._text(index, draws)
        segments = [
            of_frames(read, (settings.written_row, *settings.whole_rows[1:]), levels),
            *self._language(index, draws),
            of_tokens([settings.level_ids[0]], levels),
            of_tokens(text[:-1], levels),  # its end is predicted, and nothing follows
        ]
        sample = Assembly(segments, settings.separator, restarts_positions=settings.restarts_positions)
        sample.predict_tokens(sample.starts[-1] - 1, text, CodePart.TRANSCRIPT)
        return sample.finished(causal=True, seconds=codes.shape[1] / settings.frame_rate)

    def _codes(self, record: int) -> np.ndarray:
        assert self._reader is not None, "this rank plans, and reads no codes"
        return self._reader.codes(record)

    def _text(self, index: int, draws: ArNarDraws) -> list[int]:
        """Return the ids of the text between its ends: nothing, that of the recording, or of both of a continuation."""
        assert self._reader is not None
        begin, end = self._settings.text_ends
        if not draws.has_text[0]:
            return [begin, end]
        text = self._reader.texts(index)[0].tolist()
        if draws.continues[0]:
            text += [*self._settings.space, *self._reader.texts(int(draws.response[0]))[0].tolist()]
        return [begin, *text, end]

    def _language(self, index: int, draws: ArNarDraws) -> list[Segment]:
        assert self._reader is not None
        if not draws.tells_language[0]:
            return []
        begin, end = self._settings.language_ends
        return [of_tokens([begin, *self._reader.texts(index)[2].tolist(), end], self._settings.levels)]

    def _prompt(self, draws: ArNarDraws) -> np.ndarray:
        """Return the codes of the prompt: int[L, P]."""
        pieces = [np.empty((self._settings.levels, 0), np.int64)]
        for record, begin, frames in zip(*(values[0].tolist() for values in draws.prompts), strict=True):
            if frames:
                pieces.append(self._codes(record)[:, begin : begin + frames])
        return np.concatenate(pieces, axis=1)

    def _draws(self, start: int, stop: int, epoch: int) -> ArNarDraws:
        """Draw for recordings start <= i < stop."""
        settings, facts = self._settings, self._facts
        first, count = CHOICES * start, CHOICES * (stop - start)
        uniform = uniforms(Purpose.CODE_CHOICES, settings.seed, epoch, self._number, first, count).reshape(-1, CHOICES)
        records = np.arange(start, stop)
        numbers = np.array([TASKS.index(task) for task in settings.tasks])
        task = numbers[(uniform[:, 0] * len(numbers)).astype(np.int64)]
        another = self._speakers.another(records, uniform[:, 7])
        alone = (task == TASKS.index(CONTINUATION)) & (another < 0)
        task = np.where(alone, TASKS.index(TTS), task)
        continues, transcribes = task == TASKS.index(CONTINUATION), task == TASKS.index(STT)
        low, high = settings.prompt_seconds
        seconds = low + (high - low) * uniform[:, 2]
        prompts = draw_prompts(
            records,
            uniform[:, 7:15],
            wanted=np.maximum(1, (seconds * settings.frame_rate).astype(np.int64)),
            source=_choose(settings.prompt_sources, uniform[:, 3]),
            frames=facts.frames,
            speakers=self._speakers,
            similar=self._similar,
            utterances=settings.prompt_utterances,
        )
        drops = ~transcribes & (uniform[:, 4] < settings.condition_dropout)
        # Where there is none, and where another one follows:
        prompts.frames[drops | transcribes | continues | (uniform[:, 5] < settings.prompt_dropout)] = 0
        whole = continues & ~drops
        prompts.record[whole, 0], prompts.begin[whole, 0] = records[whole], 0
        prompts.frames[whole, 0] = facts.frames[records[whole]]
        return ArNarDraws(
            task,
            np.where(transcribes, 0, _choose(settings.level_weights, uniform[:, 1])),
            ~drops,
            (facts.language[start:stop] > 0) & (uniform[:, 6] < settings.language),
            np.where(continues, another, records),
            prompts,
        )

    def _positions(self, draws: ArNarDraws, start: int, stop: int) -> np.ndarray:
        """Return the positions of samples start <= i < stop: int64."""
        settings, facts = self._settings, self._facts
        second = np.where(draws.continues, len(settings.space) + facts.text[draws.response], 0)
        text = len(settings.text_ends) + draws.has_text * (facts.text[start:stop] + second)
        language = draws.tells_language * (facts.language[start:stop] + len(settings.language_ends) + 1)
        prompt = draws.prompts.frames.sum(axis=1)
        prompt += (prompt > 0) * (1 + draws.continues)
        frames = facts.frames[draws.response].astype(np.int64)
        # Separators of text and level, and the level; of a transcript those of response and level, without the end.
        return text + language + prompt + frames + np.where(draws.transcribes, 2, 3)

    def _draw_lengths(self, epoch: int) -> EpochLengths:
        def positions(start: int, stop: int) -> np.ndarray:
            return self._positions(self._draws(start, stop, epoch), start, stop)

        return lengths_by_blocks(len(self._facts.frames), positions, self._settings.max_seq_len)


def _choose(weights: tuple[float, ...], uniform: np.ndarray) -> np.ndarray:
    """Return int64[n], which of the weighted choices each uniform number falls on."""
    borders = np.cumsum(weights)
    return np.searchsorted(borders / borders[-1], uniform, side="right")

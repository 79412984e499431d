"""Turn recordings as codes into what an epoch draws its samples from: token ids of what is said, and facts.

`input_ids` of a sample are those of the text, of its other spelling, of the language and of the instruction, one after
another; `spoken` says how many each has, and what else is known (`drawing.SpokenFacts`). Codes of shards stay there.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from erniekit.data.code_reader import SpeechFacts, split_offset, stamp_shard
from erniekit.data.formats.problems import Effect, MalformedError, RecordProblem
from erniekit.data.formats.speech_codes import is_shards, shards_at
from erniekit.data.media.code_shards import shard_key
from erniekit.data.placeholders import Recordings
from erniekit.data.speakers import lone_recordings
from erniekit.data.speech_text import PHONEMES, TOKENIZER, text_ids, writes_control_token
from erniekit.data.templates.ernie import Sample
from erniekit.data.token_cache import Metadata
from erniekit.data.units import SpokenText

if TYPE_CHECKING:
    from erniekit.data.encode import SourceRun
    from erniekit.data.tokenize import NumberedRecord

DURATION_TOLERANCE_S = 0.1  # beside one frame, between a recording and its codes
_NO_PLACE = (-1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class SpeechSettings:
    """What records as codes must be like, and how their texts become token ids.

    Attributes:
        levels, codebook_size: of the codec.
        frame_rate: of the codec, in frames a second.
        frontend: one of speech_text.FRONTENDS.
        shortest, longest: seconds; a recording outside is left out.
        needs_text: whether a record without text is a problem.
    """

    levels: int
    codebook_size: int
    frame_rate: float
    frontend: str
    shortest: float = 0.0
    longest: float = math.inf
    needs_text: bool = True


class SpeechIndex:
    """What is recorded of the recordings of a source as they are read, one after another.

    Args:
        path: of the source: shards, or a file whose records have their own codes.
    """

    def __init__(self, path: Path) -> None:
        self._shards = [stamp_shard(shard) for shard in shards_at(path)] if is_shards(path) else []
        self._path = str(path)
        self._speakers: dict[str, int] = {}
        self._of = array("i")
        self._keys = array("Q")  # 64 bits of each name: eight bytes a recording
        self._similar: dict[int, tuple[str, ...]] = {}
        self._seconds = 0.0
        self._digest = hashlib.blake2b(digest_size=8)

    def file_of(self, record: SpokenText) -> str:
        """Return the file in which a record stands."""
        return self._path if record.place is None else self._shards[record.place.file].records

    def add(self, record: SpokenText, seconds: float, tokens: Sequence[list[int]]) -> int:
        """Take the next recording and its token ids; return the number of its speaker, -1 if that is not known."""
        number = len(self._of)
        speaker = self._speakers.setdefault(record.speaker, len(self._speakers)) if record.speaker else -1
        self._of.append(speaker)
        self._keys.append(_key_bits(record.key) if record.key else 0)
        if record.similar:
            self._similar[number] = record.similar
        self._seconds += seconds
        self._digest.update(repr((record.shape, record.clean_start, speaker, seconds, tokens)).encode())
        self._digest.update(record.digest if record.codes is None else record.codes.tobytes())
        return speaker

    def metadata(self, settings: SpeechSettings) -> Metadata:
        """Return the entry for the metadata of the source."""
        facts = SpeechFacts(
            settings.levels,
            settings.codebook_size,
            settings.frame_rate,
            self._digest.hexdigest(),
            tuple(self._speakers),
            lone_recordings(self._of),
            self._seconds,
            tuple(self._shards),
            tuple(self._named_similar()),
        )
        return facts.metadata()

    def _named_similar(self) -> list[tuple[int, int]]:
        """Return for each recording with `similar` the first other one that is named and there."""
        if not self._similar:
            return []
        keys = np.frombuffer(self._keys, np.uint64)
        order = np.argsort(keys, kind="stable")
        found = []
        for number, names in self._similar.items():
            for spelled in (each for name in names for each in (name, shard_key(name))):  # as lines do, and shards
                place = int(np.searchsorted(keys, np.uint64(_key_bits(spelled)), sorter=order))
                other = int(order[min(place, len(order) - 1)])
                if other != number and int(keys[other]) == _key_bits(spelled):
                    found.append((number, other))
                    break
        return found


def _key_bits(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def encode_speech(block: list[NumberedRecord], recordings: Recordings, run: SourceRun) -> Iterator[tuple[int, Sample]]:
    """Yield for each record the ids of its texts and its facts, with its line; labels are empty."""
    del recordings
    settings = run.settings.speech
    assert settings is not None, "the run reads recordings as codes"
    kept: list[tuple[int, SpokenText]] = []
    for line, record in block:
        assert isinstance(record, SpokenText)
        try:
            _check(record, settings)
        except MalformedError as error:
            _add(run, line, record, error)
            continue
        fits = settings.shortest <= _seconds(record, settings) <= settings.longest
        run.counts.outside += not fits
        if fits:
            kept.append((line, record))
    records = [record for _, record in kept]
    encoded = zip(*_texts(records, run, settings), strict=True)
    for (line, record), ids in zip(kept, encoded, strict=True):
        try:
            tokens = [_raised(each) for each in ids]
            _refuse_too_long(record, tokens, run)
        except MalformedError as error:
            _add(run, line, record, error)
            continue
        fits = record.shape[1] <= run.settings.max_seq_len
        run.counts.dropped += not fits
        if fits:
            yield line, _sample(record, tokens, run, settings)


def _raised(ids: list[int] | MalformedError) -> list[int]:
    if isinstance(ids, MalformedError):
        raise ids
    return ids


def _texts(
    records: Sequence[SpokenText], run: SourceRun, settings: SpeechSettings
) -> list[list[list[int] | MalformedError]]:
    """Return the token ids of each record's text, other spelling, language and instruction."""
    tokenizer, counts = run.settings.tokenizer, run.counts
    languages = [record.language for record in records]
    texts = [record.text for record in records]
    counts.plain_control += sum(writes_control_token(text, tokenizer) for text in texts)
    spelling = TOKENIZER if settings.frontend == PHONEMES else settings.frontend
    spoken = text_ids(texts, languages, tokenizer, settings.frontend)
    for number, text in enumerate(texts):
        if not text:  # phonemes of nothing need no language
            spoken[number] = []
    return [
        spoken,
        text_ids([record.pinyin for record in records], languages, tokenizer, spelling),
        text_ids(languages, languages, tokenizer, TOKENIZER),
        text_ids([record.instruct for record in records], languages, tokenizer, TOKENIZER),
    ]


def _sample(record: SpokenText, tokens: Sequence[list[int]], run: SourceRun, settings: SpeechSettings) -> Sample:
    frames, seconds = record.shape[1], _seconds(record, settings)
    assert run.speech is not None, "the source holds recordings as codes"
    speaker = run.speech.add(record, seconds, tokens)
    place = _NO_PLACE
    if record.place is not None:
        place = record.place.file, *split_offset(record.place.offset), record.place.item_size
    ids = np.array([number for each in tokens for number in each], np.int32)
    numbers = [*map(len, tokens), frames, record.clean_start, speaker, *place, round(1000 * seconds)]
    return Sample(ids, ids[:0], spoken=np.array(numbers, np.int32), codes=record.codes)


def _check(record: SpokenText, settings: SpeechSettings) -> None:
    """Raise MalformedError unless the codes are of the codec, and fit what the record says."""
    levels, frames = record.shape
    if levels != settings.levels:
        expected = f"{settings.levels} levels, those of the codec"
        raise MalformedError("codes", expected, str(levels))
    if record.largest >= settings.codebook_size:
        expected = f"codes below {settings.codebook_size:,}, the size of the codec's books"
        raise MalformedError("codes", expected, f"{record.largest:,}")
    rate = settings.frame_rate
    if record.frame_rate is not None and abs(record.frame_rate - rate) > 1e-3 * rate:
        raise MalformedError("units_per_second", f"{rate:g}, the frames of the codec", f"{record.frame_rate:g}")
    if record.seconds is not None and abs(record.seconds - frames / rate) > DURATION_TOLERANCE_S + 1 / rate:
        expected = f"about {frames / rate:.2f} s, of {frames:,} frames at {rate:g} a second"
        raise MalformedError("audio_duration", expected, f"{record.seconds:g} s")
    if settings.needs_text and not record.text:
        raise MalformedError("text", "what is said (condition_dropout: 1 trains without texts)", "nothing")


def _refuse_too_long(record: SpokenText, tokens: Sequence[list[int]], run: SourceRun) -> None:
    """Raise MalformedError for a record whose codes and texts alone are too long, where that stops a run."""
    if run.settings.over_length != "error":
        return
    text, pinyin, language, instruct = map(len, tokens)
    longest = max(text, pinyin) + language + instruct + record.shape[1]
    if longest > run.settings.max_seq_len:
        expected = f"at most {run.settings.max_seq_len:,} positions (max_seq_len) of codes and texts"
        raise _TooLongError("length", expected, f"{longest:,}")


class _TooLongError(MalformedError):
    effect = Effect.STOP


def _seconds(record: SpokenText, settings: SpeechSettings) -> float:
    return record.shape[1] / settings.frame_rate if record.seconds is None else record.seconds


def _add(run: SourceRun, line: int, record: SpokenText, error: MalformedError) -> None:
    path = str(run.source.path) if run.speech is None else run.speech.file_of(record)
    run.problems.add(RecordProblem(path, line, error.field, error.expected, error.got, error.effect))

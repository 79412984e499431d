"""Read the codes of recordings: from the token cache, or where they lie in shards, which are not copied.

A file of a shard is opened for each recording and compared with what it was when the cache was built: so any number of
shards and threads can be read, and one that is moved, cut or changed during a run is noticed at once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from erniekit.data.drawing import SPOKEN_NUMBERS, SpokenFacts
from erniekit.data.media.code_shards import CodePlace, Shard
from erniekit.data.token_cache import Metadata, TokenArrays
from erniekit.errors import DataError

SPEECH = "speech"  # the entry of the metadata; only recordings as codes have it
_OFFSET_BITS = 31  # of the lower of the two numbers of an offset, so that it is no negative int32
_FILE, _ITEM_SIZE = 7, 10  # columns of `TokenArrays.spoken`; the offset is between them


class StampedShard(NamedTuple):
    """The files of a shard, and what the tar file was like when it was read."""

    tar: str
    records: str
    size: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class SpeechFacts:
    """What the metadata of a source of recordings as codes say.

    Attributes:
        levels, codebook_size: of the codes.
        frame_rate: frames a second.
        digest: of all codes, texts and facts.
        speakers: their names; a speaker's number is the place in this list.
        alone: recordings whose speaker is not known, or has no other.
        seconds: of sound.
        files: the shards; () where the codes are in the cache.
        similar: for some samples the one that its record says is most similar to it.
    """

    levels: int
    codebook_size: int
    frame_rate: float
    digest: str
    speakers: tuple[str, ...]
    alone: int
    seconds: float
    files: tuple[StampedShard, ...]
    similar: tuple[tuple[int, int], ...]

    def metadata(self) -> Metadata:
        """Return the entry for the metadata of a source."""
        return {SPEECH: {name: getattr(self, name) for name in self.__slots__}}

    @classmethod
    def of(cls, metadata: Metadata) -> SpeechFacts | None:
        """Return what `metadata` gave, from JSON; None for other sources."""
        stored = metadata.get(SPEECH)
        if stored is None:
            return None
        listed = {
            "speakers": tuple(stored["speakers"]),
            "files": tuple(StampedShard(*values) for values in stored["files"]),
            "similar": tuple((int(sample), int(other)) for sample, other in stored["similar"]),
        }
        return cls(**{**stored, **listed})


def stamp_shard(shard: Shard) -> StampedShard:
    """Look at the tar file of a shard."""
    status = os.stat(shard.tar)
    return StampedShard(str(shard.tar), str(shard.records), status.st_size, status.st_mtime_ns)


def shards_unchanged(metadata: Metadata) -> bool:
    """Return whether the shards of a source have the size and the time of when its samples were built."""
    facts = SpeechFacts.of(metadata)
    try:
        return facts is None or all(stamp_shard(_shard(each)) == each for each in facts.files)
    except OSError:
        return False


def split_offset(offset: int) -> tuple[int, int]:
    """Return an offset as two numbers of the token cache."""
    return offset >> _OFFSET_BITS, offset & ((1 << _OFFSET_BITS) - 1)


class CodeReader:
    """The recordings of a source: their codes, texts and speakers. Threads may share one.

    A rank that opens no data has their numbers, but neither codes nor texts.
    """

    def __init__(self, arrays: TokenArrays) -> None:
        facts = SpeechFacts.of(arrays.metadata)
        assert facts is not None, "the source holds recordings as codes"
        self._arrays, self._facts = arrays, facts
        self._table = arrays.spoken.reshape(-1, SPOKEN_NUMBERS)

    @property
    def facts(self) -> SpeechFacts:
        return self._facts

    def __len__(self) -> int:
        return len(self._table)

    def speaker(self) -> np.ndarray:
        """int32[n], the number of each recording's speaker; -1: not known."""
        return SpokenFacts.of(self._table).speaker

    def milliseconds(self) -> np.ndarray:
        """int32[n], the length of each recording."""
        return SpokenFacts.of(self._table).milliseconds

    def place(self, index: int) -> CodePlace | None:
        """Return where the codes of a recording lie; None: in the token cache."""
        row = self._table[index].tolist()
        file, high, low, item_size = row[_FILE : _ITEM_SIZE + 1]
        if file < 0:
            return None
        return CodePlace(file, high << _OFFSET_BITS | low, item_size, self._facts.levels, row[4])

    def records_file(self, index: int) -> str:
        """Return the file in which the record of a recording stands; "": the source's own."""
        file = int(self._table[index, _FILE])
        return "" if file < 0 else self._facts.files[file].records

    def codes(self, index: int) -> np.ndarray:
        """Return the codes of a recording: int32[C, T].

        Raises:
            DataError: the file in which they lie was changed since the token cache was built.
        """
        place = self.place(index)
        if place is not None:
            return self._checked(_read(self._facts.files[place.file], place), index)
        for file in self._arrays.files:
            file.refuse_truncated()
        start, end = self._arrays.code_offsets[index : index + 2].tolist()
        return self._arrays.codes[start:end].reshape(self._facts.levels, -1).astype(np.int32)

    def first_level(self, index: int) -> np.ndarray:
        """Return the codes of level 0 of a recording: int32[T]; those of the other levels are not read."""
        place = self.place(index)
        if place is None or place.item_size < 0:
            return self.codes(index)[0]
        return self._checked(_read(self._facts.files[place.file], place._replace(levels=1)), index)[0]

    def texts(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the token ids of the text, its other spelling, the language and the instruction: int32 each."""
        for file in self._arrays.files:
            file.refuse_truncated()
        start = int(self._arrays.offsets[index])
        ends = start + np.cumsum(self._table[index, :4])
        text, pinyin, language, instruct = np.split(self._arrays.input_ids[start : ends[-1]], ends[:-1] - start)
        return text, pinyin, language, instruct

    def _checked(self, codes: np.ndarray, index: int) -> np.ndarray:
        if codes.size and int(codes.max()) >= self._facts.codebook_size:
            place = self.place(index)
            assert place is not None
            raise _changed(self._facts.files[place.file], f"a code of {int(codes.max()):,}")
        return codes.astype(np.int32)


def code_reader(arrays: TokenArrays) -> CodeReader | None:
    """Return what reads the codes of a source; None where it holds something else."""
    return CodeReader(arrays) if SPEECH in arrays.metadata else None


def _shard(stamped: StampedShard) -> Shard:
    return Shard(Path(stamped.tar), Path(stamped.records))


def _read(file: StampedShard, place: CodePlace) -> np.ndarray:
    """Return the unsigned integers at a place: [C, T]."""
    size = abs(place.item_size) * place.levels * place.frames
    try:
        with open(file.tar, "rb", buffering=0) as opened:
            status = os.fstat(opened.fileno())
            opened.seek(place.offset)
            content = opened.read(size)
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)
        raise _changed(file, "no such file: it was moved or removed" if gone else str(error.strerror)) from None
    if status.st_size != file.size:
        raise _changed(file, f"{status.st_size:,} bytes")
    if status.st_mtime_ns != file.modified_ns:
        raise _changed(file, "another time of modification")
    if len(content) != size:
        raise _changed(file, f"{len(content):,} of {size:,} bytes at byte {place.offset:,}")
    codes = np.frombuffer(content, f"<u{abs(place.item_size)}")
    if place.item_size < 0:
        return codes.reshape(place.frames, place.levels).T
    return codes.reshape(place.levels, place.frames)


def _changed(file: StampedShard, got: str) -> DataError:
    return DataError(
        f"{file.tar}: expected the shard as it was when its texts were tokenised, of {file.size:,} bytes, got {got}\n"
        "  Put it back, or start again: a changed shard is then read anew."
    )

"""Speech as codes: with the times of its words, as a part of a message, or to be spoken; and ready token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # parsers of dialogues need no NumPy
    import numpy as np

    from erniekit.data.media.code_shards import CodePlace

ALIGNED_UNITS = "aligned_units"  # the kind of the records whose speech and text are interleaved
CODES = "codes"  # the kind of those that teach a model to speak


class AlignedWord(NamedTuple):
    """A word of a recording and the stretch in which it is said, in seconds from the beginning."""

    text: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class AlignedUnits:
    """A recording as units, and its words with their times.

    Attributes:
        units: the codes in order, of equal duration each.
        words: in order; none overlaps another.
        duration: of the recording, in seconds; None: that of the units at their rate.
        units_per_second: what the record says of their rate; None: nothing.
        alignment: the file that the words were read from, which is looked at again before a token cache is used; "" for
            words in the record itself.
    """

    units: tuple[int, ...]
    words: tuple[AlignedWord, ...]
    duration: float | None = None
    units_per_second: float | None = None
    alignment: str = ""


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A sample that was tokenised elsewhere.

    Attributes:
        ids: of its tokens, t0..tn.
        targets: for each of the tokens whether it is a target.
        packed: whether it may hold several documents, each of which begins with the BOS token.
    """

    ids: tuple[int, ...]
    targets: tuple[bool, ...]
    packed: bool = False


class Units(NamedTuple):
    """A stretch of speech as a part of a message: the codes in order."""

    codes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpokenText:
    """A recording as codes, and what is said in it.

    Attributes:
        text: what is said; may be empty.
        codes: uint16[C, T]; None where `place` says in which shard they lie.
        place: None for codes of the record itself.
        largest: the largest code.
        digest: of the codes at `place`; b"" without.
        seconds: the length of the recording; None: that of the codes.
        frame_rate: of the codes a second, as the record says; None: nothing.
        language: such as en; "": not known.
        instruct: how it is said, in words; "": not known.
        pinyin: the text in another spelling, which may take its place; "": none.
        speaker: a name; "": not known.
        key: the name of the record; "": none.
        similar: the names of those that sound alike, the most similar one first.
        clean_start: the frame at which clean speech begins, behind a noisy prompt; -1: there is none.
    """

    text: str
    codes: np.ndarray | None
    place: CodePlace | None
    largest: int
    seconds: float | None = None
    frame_rate: float | None = None
    language: str = ""
    instruct: str = ""
    pinyin: str = ""
    speaker: str = ""
    key: str = ""
    similar: tuple[str, ...] = ()
    clean_start: int = -1
    digest: bytes = b""

    @property
    def shape(self) -> tuple[int, int]:
        """(C, T)."""
        if self.place is not None:
            return self.place.levels, self.place.frames
        assert self.codes is not None
        return self.codes.shape[0], self.codes.shape[1]

"""Speech as units: records whose speech is a row of codes, with the words that are said in it, and ready token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

ALIGNED_UNITS = "aligned_units"  # the kind of the records whose speech and text are interleaved


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

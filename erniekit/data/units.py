"""Speech as units: records whose speech is a row of codes, with the words that are said in it, and ready token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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
        duration: of the recording, in seconds.
    """

    units: tuple[int, ...]
    words: tuple[AlignedWord, ...]
    duration: float


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

"""Speak texts: what is asked for, what comes back, and how the models that write codes are called.

`speaker.py` has the model with its tokenizer and codec; `unmasking.py` and `ar_nar.py` write codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

PIECE_BITS = 16  # of the number of a stream of draws, behind those of its text


@dataclass(frozen=True, eq=False)
class Voice:
    """A recording whose voice a text is to be spoken in.

    Attributes:
        codes: int64 [C, T].
        text: what is said in it.
        rms: the root mean square of its samples, before they were made louder; None: unknown, or the model chose it.
    """

    codes: np.ndarray
    text: str
    rms: float | None = None


@dataclass(frozen=True)
class Utterance:
    """A text to be spoken.

    Attributes:
        language: such as `en`; "": not told.
        instruct: describes the voice, in the words that the model has been trained on; "": none.
        voice: whose voice; None: the model chooses one.
        duration: seconds; None: as the length of the text suggests. It counts before `speed`.
        speed: above 1 speaks faster.
        number: of its stream of random draws.
        place: of the text, for messages: `texts.jsonl:3`.
        continues: the text goes on from what the voice says; only where the model has been trained for it.
    """

    text: str
    language: str = ""
    instruct: str = ""
    voice: Voice | None = None
    duration: float | None = None
    speed: float = 1.0
    number: int = 0
    place: str = ""
    continues: bool = False


class Piece(NamedTuple):
    """The sound of a part of an utterance; those of an utterance come in order, and joined they are its sound.

    Attributes:
        utterance: its index among those that were asked for.
        number: of the piece, from 0.
        last: whether the utterance ends with it.
        codes: int64 [C, T].
        sound: float32 [samples].
        seconds: since the command to speak until this piece was ready.
        cut: whether the model had not ended when it reached the longest duration.
    """

    utterance: int
    number: int
    last: bool
    codes: np.ndarray
    sound: np.ndarray
    seconds: float
    cut: bool = False


class PreparedUtterance(NamedTuple):
    """A piece of text as a writer of codes takes it.

    Attributes:
        text_ids: of masked codes the ids of everything that stands before the codes; else those of the text, without
            the tokens around it.
        frames: how many are to be written; None: the model ends by itself, after `most_frames` at the latest.
        voice_codes: int64 [C, T] of the voice; None: none.
        language_ids: of the language without the tokens around it, where the writer places it; [] if it is not told.
        number: of its stream of random draws.
        continues: see `Utterance`.
    """

    text_ids: list[int]
    frames: int | None
    voice_codes: np.ndarray | None
    language_ids: list[int]
    number: int
    most_frames: int = 0
    continues: bool = False

    @property
    def text_number(self) -> int:
        """Of the text of which it is a piece, from 1, for messages."""
        return (self.number >> PIECE_BITS) + 1


class Written(NamedTuple):
    """What a writer wrote for the request of this index: codes int64 [C, T], at least one frame unless it chose to say
    nothing; `cut`: it had not ended."""

    request: int
    codes: np.ndarray
    cut: bool = False


class CodeWriter(Protocol):
    """Writes the codes of some pieces of text: `Unmasking` and `ArNar`."""

    def write(self, requests: Sequence[PreparedUtterance]) -> Iterator[Written]:
        """Yield what it wrote for each request, as soon as it is ready."""
        ...

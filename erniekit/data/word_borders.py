"""Place the words of a recording on its units: pauses go to their neighbours, words without units to other words.

The rules are those of the public data preparation of USDM (naver-ai/usdm, preprocess/pre-training/stage2.py, 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from erniekit.data.units import AlignedWord

DECIMALS = 2  # of the second in which a pause is divided


class PlacedWord(NamedTuple):
    """A word, or several that are not separated, and the units in which it is said: `start` <= unit < `end`."""

    text: str
    start: int
    end: int


def place_words(words: Sequence[AlignedWord], duration: float, num_units: int) -> list[PlacedWord]:
    """Divide the units among the words, in order and without a rest; each gets at least one.

    The pause between two words is divided in its middle, rounded to hundredths of a second; those at the ends belong to
    the first and the last word. Times become units in proportion and are rounded (half to even). A word that gets no
    unit joins another: the first one those behind it; the last one the word before; any other the word before and, if
    that has units, the word behind it.

    Args:
        words: in order, without overlap, within 0 and `duration` seconds; no text is blank.
        num_units: of the whole recording, at least one.
    """
    if not words:
        return []
    borders = [0.0]
    for word, following in pairwise(words):
        pause = following.start - word.end
        middle = round(word.end + pause / 2, DECIMALS) if pause > 0 else word.end
        borders.append(min(max(middle, borders[-1]), following.end))
    ratio = num_units / duration
    ends = [round(border * ratio) for border in (*borders, duration)]
    return _joined([PlacedWord(word.text, *span) for word, span in zip(words, pairwise(ends), strict=True)])


def _joined(words: list[PlacedWord]) -> list[PlacedWord]:
    """Join the words without units with others."""
    placed: list[PlacedWord] = []
    rest = list(reversed(words))  # the next word is its last item
    while rest:
        word = rest.pop()
        if word.end > word.start:
            placed.append(word)
        elif not placed and rest:  # the first word: joins the next, and is looked at again
            rest.append(_join(word, rest.pop()))
        elif not placed:
            placed.append(word)  # the only word of a recording without units
        elif rest and rest[-1].end > rest[-1].start:
            placed[-1] = _join(placed[-1], word, rest.pop())
        else:
            placed[-1] = _join(placed[-1], word)
    return placed


def _join(*words: PlacedWord) -> PlacedWord:
    return PlacedWord(" ".join(word.text for word in words), words[0].start, words[-1].end)

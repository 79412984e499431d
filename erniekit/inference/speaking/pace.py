"""How long it takes to say a text: as a voice, as the data that a model has learnt from, or as a usual speaker.

The weights of characters and the rule for short texts are those of the Python package `omnivoice` (version 0.2.1).
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from statistics import linear_regression, median
from typing import NamedTuple

import numpy as np

from erniekit.build.text_reading import Pace

REFERENCE_TEXT, REFERENCE_SECONDS = "Nice to meet you.", 1.0  # where there is no voice that tells how fast it speaks
SHORT_SECONDS = 2.0  # texts that take less are spoken more slowly
MOST_LETTERS, LETTER_MIN_TEXTS = 300, 5  # which may differ in their time
LETTER_SPREAD = 1.0  # how far letters differ usually, as a share of the mean letter: what the penalty assumes
LETTERS_MUST_SAVE = 0.9  # of the squared error of recordings that they were not fitted on
# How long a character takes beside a Latin letter: by its category in Unicode (punctuation, signs, spaces, figures,
# accents), then by the first code point of each range.
_BY_CATEGORY = {"P": 0.5, "S": 0.5, "Z": 0.2, "N": 3.5, "M": 0.0}
_TATWEEL = "\u0640"  # lengthens a line of Arabic, not its sound
_LETTERS = (
    (0x0000, 1.0),  # Latin, Greek, Cyrillic, Armenian
    (0x0590, 1.5),  # Hebrew, Arabic, Syriac
    (0x0900, 1.8),  # scripts of India
    (0x0E00, 1.5),  # Thai, Lao
    (0x0F00, 1.8),  # Tibetan, Burmese
    (0x10A0, 1.0),  # Georgian
    (0x1100, 2.5),  # parts of Korean syllables
    (0x1200, 3.0),  # Ethiopic
    (0x13A0, 1.0),
    (0x1780, 1.8),  # Khmer
    (0x1800, 1.0),
    (0x1900, 1.8),  # from Limbu to Ol Chiki
    (0x1C80, 1.0),
    (0x1CC0, 1.8),
    (0x1D00, 1.0),  # phonetic letters, Vietnamese
    (0x1F00, 2.2),  # kana, and what lies before it
    (0x3100, 3.0),
    (0x3130, 2.5),
    (0x3190, 3.0),  # Chinese characters, Yi
    (0xA4D0, 1.0),
    (0xA800, 1.8),
    (0xA830, 1.0),
    (0xA880, 1.8),
    (0xA960, 2.5),
    (0xA980, 1.8),
    (0xAB00, 3.0),
    (0xAB30, 1.0),
    (0xABC0, 1.8),
    (0xAC00, 2.5),  # Korean syllables
    (0xD7B0, 3.0),
    (0xFB00, 1.5),
    (0xFE00, 1.0),
    (0xFE70, 1.5),
    (0xFF00, 1.0),
    (0x20001, 3.0),  # rare Chinese characters
)
_STARTS = [start for start, _ in _LETTERS]


class SpokenReference(NamedTuple):
    """How long a text took to say, which tells how fast another one is spoken."""

    text: str
    frames: float


def speaking_weight(text: str) -> float:
    """Return how long it takes to say a text, in Latin letters."""
    return sum(map(_weight, text))


@lru_cache(maxsize=4096)
def _weight(character: str) -> float:
    if character == _TATWEEL:
        return 0.0
    category = unicodedata.category(character)[0]
    if category in _BY_CATEGORY:
        return _BY_CATEGORY[category]
    return _LETTERS[bisect_right(_STARTS, ord(character)) - 1][1]


def estimated_frames(
    text: str,
    frame_rate: float,
    reference: SpokenReference | None = None,
    *,
    speed: float = 1.0,
    pace: Pace | None = None,
) -> int:
    """Return how many frames it takes to say a text, at least one.

    With a reference it is as fast as that; without one as fast as the data that `pace` was measured on, or as a usual
    speaker. Texts of less than 2 seconds get more time than their share, but where it was measured.

    Args:
        speed: above 1 takes less time.
        pace: of the model's data (`measured_pace`); None: unknown.
    """
    if reference is None or not reference.text:
        if pace is not None:
            seconds = _seconds(text, pace)
            return max(1, round(seconds * frame_rate / speed))
        reference = SpokenReference(REFERENCE_TEXT, REFERENCE_SECONDS * frame_rate)
    own = speaking_weight(reference.text)
    if own == 0 or reference.frames <= 0:
        return 1
    frames = speaking_weight(text) / (own / reference.frames)
    short = SHORT_SECONDS * frame_rate
    if frames < short:
        frames = short * (frames / short) ** (1.0 / 3)
    return max(1, int(frames if speed == 1.0 else frames / speed))


def measured_pace(records: Iterable[tuple[str, float]]) -> Pace | None:
    """Return the line of least squares through the letters of texts and the seconds that they take, and how far each
    letter is from it.

    What a recording takes besides its letters is silence around them, mostly. Where all texts are about as long, or
    longer ones take less time, a line means nothing, and the median of seconds for each letter counts. Letters differ
    only where that tells the lengths of every second recording better, after it was fitted on the others. None: no text
    can be said.
    """
    points = [(text, seconds) for text, seconds in records if speaking_weight(text) > 0 and seconds > 0]
    if not points:
        return None
    line = _line(points)
    fitted, others = _with_letters(line, points[::2]), points[1::2]
    if _squared_error(fitted, others) < LETTERS_MUST_SAVE * _squared_error(line, others):
        return _with_letters(line, points)
    return line


def _line(points: Sequence[tuple[str, float]]) -> Pace:
    weights = [speaking_weight(text) for text, _ in points]
    ratio = Pace(median(seconds / weight for weight, (_, seconds) in zip(weights, points, strict=True)))
    if max(weights) < 1.5 * min(weights):
        return ratio
    slope, besides = linear_regression(weights, [seconds for _, seconds in points])
    return Pace(slope, besides) if slope > 0 and besides > 0 else ratio


def _with_letters(line: Pace, points: Sequence[tuple[str, float]]) -> Pace:
    """Fit seconds of letters to what a line leaves, by least squares with a penalty (ridge regression), which keeps
    letters that stand in few texts near it."""
    counts = [Counter(text.lower()) for text, _ in points]
    in_texts = Counter(chain.from_iterable(counts))
    letters = [letter for letter, texts in in_texts.most_common(MOST_LETTERS) if texts >= LETTER_MIN_TEXTS]
    if not letters:
        return line
    counted = np.array([[count[letter] for letter in letters] for count in counts], np.float64)
    left = np.array([seconds - _seconds(text, line) for text, seconds in points])
    penalty = left.var() / (LETTER_SPREAD * line.seconds_per_letter) ** 2
    found = np.linalg.solve(counted.T @ counted + (penalty + 1e-9) * np.eye(len(letters)), counted.T @ left)
    return line._replace(letters=dict(zip(letters, found.round(6).tolist(), strict=True)))


def _squared_error(pace: Pace, points: Sequence[tuple[str, float]]) -> float:
    return sum((_seconds(text, pace) - seconds) ** 2 for text, seconds in points)


def _seconds(text: str, pace: Pace) -> float:
    by_length = speaking_weight(text) * pace.seconds_per_letter
    by_letters = by_length + sum(pace.letters.get(letter, 0.0) for letter in text.lower())
    return pace.seconds_besides + max(by_letters, by_length / 2)

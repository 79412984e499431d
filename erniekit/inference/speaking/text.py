"""Texts to be spoken: where long ones are cut, how they follow a reference, and how long it takes to say them.

Rules and figures are those of the Python package `omnivoice` (version 0.2.1), so that a model speaks the same here.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache
from statistics import linear_regression, median
from typing import NamedTuple

from erniekit.build.text_reading import Pace

REFERENCE_TEXT, REFERENCE_SECONDS = "Nice to meet you.", 1.0  # where there is no voice that tells how fast it speaks
SHORT_SECONDS = 2.0  # texts that take less are spoken more slowly
CUTS_BEHIND = frozenset(".,;:!?。，；：！？")
CLOSING = frozenset("\"'“”‘’）]》>」】")
ENDS = CLOSING - frozenset("》>」") | CUTS_BEHIND | frozenset("…)}、")
_SHORTENED = """
    Mr Mrs Ms Dr Prof Sr Jr Rev Fr Hon Pres Gov Gen Sen Rep Col Maj Capt Lt Cmdr Sgt Cpl Co Corp Inc Ltd Est Dept
    St Ave Blvd Rd Mt Ft No Jan Feb Mar Apr Aug Sep Sept Oct Nov Dec i.e e.g vs Vs Etc approx fig def
"""
ABBREVIATIONS = frozenset(f"{word}." for word in _SHORTENED.split())
NONVERBAL = re.compile(
    r"\[(?:laughter|sigh|confirmation-en|question-(?:en|ah|oh|ei|yi)|surprise-(?:ah|oh|wa|yo)|dissatisfaction-hnn)\]"
)
_CHINESE = "\u4e00-\u9fff"
_SPACE_AT_CHINESE = re.compile(rf"(?<=[{_CHINESE}])\s+|\s+(?=[{_CHINESE}])")
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


def pieces(text: str, characters: int, least: int = 3, first: int | None = None) -> list[str]:
    """Cut a text behind punctuation into pieces of at most so many characters, as far as its sentences allow.

    A full stop behind an abbreviation does not end a sentence; further punctuation and closing marks stay with the
    sentence before them. A piece of fewer than `least` characters joins the one before it, the first one the second.

    Args:
        first: the most characters of the first piece; None: as of the others.
    """
    joined: list[str] = []
    for sentence in _sentences(text):
        limit = first if first is not None and len(joined) == 1 else characters
        if joined and len(joined[-1]) + len(sentence) <= limit:
            joined[-1] += sentence
        else:
            joined.append(sentence)
    short_start = bool(joined) and len(joined[0]) < least
    found: list[str] = []
    for number, piece in enumerate(joined):
        if found and (len(piece) < least or (number == 1 and short_start)):
            found[-1] += piece
        else:
            found.append(piece)
    return [piece.strip() for piece in found if piece.strip()]


def _sentences(text: str) -> list[str]:
    found: list[str] = []
    start = 0
    for place, character in enumerate(text):
        if place == start and found and (character in CUTS_BEHIND or character in CLOSING):
            found[-1] += character
            start = place + 1
        elif character in CUTS_BEHIND and not (character == "." and _ends_abbreviation(text[start : place + 1])):
            found.append(text[start : place + 1])
            start = place + 1
    return [*found, text[start:]] if start < len(text) else found


def _ends_abbreviation(text: str) -> bool:
    words = text.split()
    return bool(words) and words[-1] in ABBREVIATIONS


def joined_text(reference: str, text: str) -> str:
    """Return a text behind that of its reference, "" without one: in one line, without double spaces, and without
    spaces at Chinese characters."""
    both = f"{reference.strip()} {text.strip()}" if reference else text.strip()
    both = re.sub(r"[\r\n]+", "", both).replace("（", "(").replace("）", ")")
    return _SPACE_AT_CHINESE.sub("", re.sub(r"[ \t]+", " ", both))


def with_punctuation(text: str) -> str:
    """Return a text without spaces around it, with a full stop where it ends without punctuation."""
    text = text.strip()
    if not text or text[-1] in ENDS:
        return text
    return text + ("。" if re.search(f"[{_CHINESE}]", text) else ".")


def nonverbal_parts(text: str) -> list[str]:
    """Divide a text at tags such as `[laughter]`, which are encoded apart from the words around them."""
    found, last = [], 0
    for tag in NONVERBAL.finditer(text):
        found += [text[last : tag.start()], tag.group()]
        last = tag.end()
    return [part for part in (*found, text[last:]) if part]


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
            seconds = pace.seconds_besides + speaking_weight(text) * pace.seconds_per_letter
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
    """Return the line of least squares through the letters of texts and the seconds that they take.

    What a recording takes besides its letters is silence around them, mostly. Where all texts are about as long, or
    longer ones take less time, a line means nothing, and the median of seconds for each letter counts. None: no text
    can be said.
    """
    points = [(weight, seconds) for text, seconds in records if (weight := speaking_weight(text)) > 0 and seconds > 0]
    if not points:
        return None
    ratio = Pace(median(seconds / weight for weight, seconds in points))
    weights = [weight for weight, _ in points]
    if max(weights) < 1.5 * min(weights):
        return ratio
    slope, besides = linear_regression(weights, [seconds for _, seconds in points])
    return Pace(slope, besides) if slope > 0 and besides > 0 else ratio

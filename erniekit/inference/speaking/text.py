"""Texts to be spoken: where long ones are cut, and how they follow a reference.

Rules and figures are those of the Python package `omnivoice` (version 0.2.1), so that a model speaks the same here.
"""

from __future__ import annotations

import re

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

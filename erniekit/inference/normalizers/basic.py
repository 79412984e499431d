"""Normalise text of any language as Whisper's `BasicTextNormalizer` does (Radford et al., 2022, appendix C)."""

from __future__ import annotations

import re
import unicodedata

_IN_BRACKETS = re.compile(r"[<\[][^>\]]*[>\]]")
_IN_PARENTHESES = re.compile(r"\(([^)]+?)\)")
_SPACES = re.compile(r"\s+")


def normalize(text: str) -> str:
    """Return the text in lower case, without what stands in brackets or parentheses, with a space in the place of every
    mark, symbol and punctuation character after NFKC, and with one space for any white space.

    Marks (Unicode category M) are combining characters; those that NFKC has joined with a letter stay. An apostrophe
    becomes a space, so "it's" is two words. The first and the last character may be a space.
    """
    text = without_brackets(text.lower())
    text = "".join(
        " " if unicodedata.category(character)[0] in "MSP" else character
        for character in unicodedata.normalize("NFKC", text)
    )
    return one_space(text.lower())


def without_brackets(text: str) -> str:
    """Return the text without what stands in `[]`, `<>` or `()`, such as notes on noise."""
    return _IN_PARENTHESES.sub("", _IN_BRACKETS.sub("", text))


def one_space(text: str) -> str:
    """Return the text with one space in the place of any white space."""
    return _SPACES.sub(" ", text)

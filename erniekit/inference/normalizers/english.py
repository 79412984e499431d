"""Normalise English text as Whisper's `EnglishTextNormalizer` does (Radford et al., 2022, appendix C)."""

from __future__ import annotations

import functools
import re
import unicodedata
from importlib import resources

from erniekit.inference.normalizers.basic import one_space, without_brackets
from erniekit.inference.normalizers.english_numbers import numbers_as_digits

_FILLERS = re.compile(r"\b(hmm|mm|mhm|mmm|uh|um)\b")
_WORDS = {
    "won't": "will not", "can't": "can not", "let's": "let us", "ain't": "aint", "y'all": "you all",
    "wanna": "want to", "gotta": "got to", "gonna": "going to", "i'ma": "i am going to", "imma": "i am going to",
    "woulda": "would have", "coulda": "could have", "shoulda": "should have", "ma'am": "madam",
}  # fmt: skip
_TITLES = {
    "mr": "mister", "mrs": "missus", "st": "saint", "dr": "doctor", "prof": "professor", "capt": "captain",
    "gov": "governor", "ald": "alderman", "gen": "general", "sen": "senator", "rep": "representative",
    "pres": "president", "rev": "reverend", "hon": "honorable", "asst": "assistant", "assoc": "associate",
    "lt": "lieutenant", "col": "colonel", "jr": "junior", "sr": "senior", "esq": "esquire",
}  # fmt: skip
# At the end of words, in this order: the perfect tense before the general forms, which would take 's for "is".
_ENDINGS = {
    "'d been": " had been", "'s been": " has been", "'d gone": " had gone", "'s gone": " has gone",
    "'d done": " had done", "'s got": " has got", "n't": " not", "'re": " are", "'s": " is", "'d": " would",
    "'ll": " will", "'t": " not", "'ve": " have", "'m": " am",
}  # fmt: skip
_REPLACEMENTS = [
    *((re.compile(rf"\b{word}\b"), whole) for word, whole in _WORDS.items()),
    *((re.compile(rf"\b{title}\b"), f"{whole} ") for title, whole in _TITLES.items()),
    *((re.compile(rf"{ending}\b"), whole) for ending, whole in _ENDINGS.items()),
]
# Letters that NFKD does not split into a letter and a mark. Whisper's table gives these forms to capitals, too.
_PLAIN_LETTERS = {
    "œ": "oe", "Œ": "OE", "ø": "o", "Ø": "O", "æ": "ae", "Æ": "AE", "ß": "ss", "ẞ": "SS", "đ": "d", "Đ": "D",
    "ð": "d", "Ð": "D", "þ": "th", "Þ": "th", "ł": "l", "Ł": "L",
}  # fmt: skip
_OF_NUMBERS = ".%$¢€£"  # stay until numbers are read


def normalize(text: str) -> str:
    """Return the text in lower case, without fillers ("uh"), brackets, diacritics and punctuation, with contractions
    and titles written out, numbers in digits and American spelling.

    - "won't" is "will not", "it's" is "it is", "dr" is "doctor" and so on;
    - "twenty-one" is "21", "$2 million" is "$2000000", "five per cent" is "5%": see `english_numbers`;
    - 1,738 words have their American spelling.

    The first and the last character may be a space.
    """
    text = _FILLERS.sub("", without_brackets(text.lower()))
    text = re.sub(r"\s+'", "'", text)
    for pattern, whole in _REPLACEMENTS:
        text = pattern.sub(whole, text)
    text = re.sub(r"(\d),(\d)", r"\1\2", text)
    text = re.sub(r"\.([^0-9]|$)", r" \1", text)  # a period that is not in a number
    text = numbers_as_digits(_without_symbols_and_diacritics(text))
    spellings = american_spellings()
    text = " ".join(spellings.get(word, word) for word in text.split())
    text = re.sub(r"[.$¢€£]([^0-9])", r" \1", text)  # what belongs to no number
    text = re.sub(r"([^0-9])%", r"\1 ", text)
    return one_space(text)


def _without_symbols_and_diacritics(text: str) -> str:
    return "".join(_plain(character) for character in unicodedata.normalize("NFKD", text))


def _plain(character: str) -> str:
    if character in _OF_NUMBERS:
        return character
    if character in _PLAIN_LETTERS:
        return _PLAIN_LETTERS[character]
    category = unicodedata.category(character)
    return "" if category == "Mn" else " " if category[0] in "MSP" else character


@functools.cache
def american_spellings() -> dict[str, str]:
    """Return British spellings with the American ones."""
    table = resources.files(__package__).joinpath("english_spellings.txt").read_text(encoding="utf-8")
    return dict(line.split() for line in table.splitlines() if line and not line.startswith("#"))

"""The normalisers `basic` and `english` give the texts that those of Whisper give in transformers."""

from __future__ import annotations

import random

import pytest
from transformers.models.whisper import english_normalizer as whisper

from erniekit.inference.normalizers import text_normalizer
from erniekit.inference.normalizers.english import _ENDINGS, _TITLES, _WORDS, american_spellings
from erniekit.inference.normalizers.english_numbers import _MAY_BE_OF_A_NUMBER
from tests.inference.test_text_normalizers import BASIC, ENGLISH

pytestmark = pytest.mark.parity

WORDS = sorted(_MAY_BE_OF_A_NUMBER)
OTHERS = [
    "a", "cats", "the", "uh", "hmm", "a half", "and a half", "$5", "£3.50", "7%", "%", "3.5", "2,000", "20", "1", "0",
    "0.5", "007", "1960s", "42nd", "3rd", "no. 7", "x2", "2x", "[noise]", "(laughs)", "<unk>", "Mr.", "it 's", "café",
    "naïve", "Øre", "straße", "10.0.0.1", "don't", "she'd been", "¢7", "$2 and 7 cents", "$0.5", "+4", "-3", "1/2",
    "٣", "北京", "e\u0301", "\ttab", "one's", "twenty-one", "per cent", "...", "5.", "$", "point", ".5", "colour",
]  # fmt: skip
CHARACTERS = "abcdez 019.,'\"$£%¢€-+()[]<>/éßØ٣２①北\u0301\u00a0\n\t"


def random_texts(count: int) -> list[str]:
    draw = random.Random(14)
    pieces = [*WORDS, *OTHERS, *_WORDS, *_TITLES, *(f"she{ending}" for ending in _ENDINGS)]
    of_numbers = [" ".join(draw.choices(WORDS, k=draw.randint(1, 8))) for _ in range(count)]
    of_pieces = [" ".join(draw.choices(pieces, k=draw.randint(1, 9))) for _ in range(count)]
    of_characters = ["".join(draw.choices(CHARACTERS, k=draw.randint(0, 25))) for _ in range(count)]
    return [*of_numbers, *of_pieces, *(text.title() for text in of_pieces[: count // 4]), *of_characters]


def test_basic_is_that_of_transformers() -> None:
    ours, theirs = text_normalizer("basic"), whisper.BasicTextNormalizer()
    for text in [*BASIC, *random_texts(3000)]:
        assert ours(text) == theirs(text), text


def test_english_is_that_of_transformers() -> None:
    """With the table of spellings that is in the package; models of the hub have it as `normalizer.json`."""
    ours, theirs = text_normalizer("english"), whisper.EnglishTextNormalizer(american_spellings())
    for text in [*ENGLISH, *american_spellings(), *random_texts(4000)]:
        assert ours(text) == theirs(text), text

"""Texts are divided and joined as the package `omnivoice` does it (tools/parity/record_speaking.py)."""

from __future__ import annotations

import json

import pytest

from erniekit.inference.speaking.text import joined_text, nonverbal_parts, pieces, with_punctuation
from tests.inference.speaking.speaking_cases import LENGTHS, RECORDED, SPOKEN


@pytest.fixture(scope="module")
def recorded() -> dict:
    return json.loads((RECORDED / "texts.json").read_text(encoding="utf-8"))


def test_pieces_are_those_of_the_package(recorded: dict) -> None:
    assert [[pieces(text, length) for length in LENGTHS] for text in SPOKEN] == recorded["pieces"]


def test_texts_are_joined_and_punctuated_as_in_the_package(recorded: dict) -> None:
    assert [[joined_text(other, text) for other in ("", *SPOKEN)] for text in SPOKEN] == recorded["joined"]
    assert [with_punctuation(text) for text in SPOKEN] == recorded["punctuated"]


def test_the_first_piece_may_be_shorter() -> None:
    text = "One, two, three, four, five, six, seven, eight."
    assert pieces(text, 30) == ["One, two, three, four, five,", "six, seven, eight."]
    assert pieces(text, 30, first=6) == ["One,", "two, three, four, five, six,", "seven, eight."]
    assert pieces("", 30) == pieces(" \n ", 30) == []


def test_tags_are_parts_of_their_own() -> None:
    text = "Well [sigh] then[laughter][no tag]."
    assert nonverbal_parts(text) == ["Well ", "[sigh]", " then", "[laughter]", "[no tag]."]
    assert nonverbal_parts("") == []

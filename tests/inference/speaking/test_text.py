"""Texts are divided, joined and timed as the package `omnivoice` does it (tools/parity/record_speaking.py)."""

from __future__ import annotations

import json
from unicodedata import ucd_3_2_0

import pytest

from erniekit.build.text_reading import Pace
from erniekit.inference.speaking.text import (
    SpokenReference,
    estimated_frames,
    joined_text,
    measured_pace,
    nonverbal_parts,
    pieces,
    speaking_weight,
    with_punctuation,
)
from tests.inference.speaking.speaking_cases import LENGTHS, RECORDED, REFERENCES, SPEEDS, SPOKEN


@pytest.fixture(scope="module")
def recorded() -> dict:
    return json.loads((RECORDED / "texts.json").read_text(encoding="utf-8"))


def test_pieces_are_those_of_the_package(recorded: dict) -> None:
    assert [[pieces(text, length) for length in LENGTHS] for text in SPOKEN] == recorded["pieces"]


def test_texts_are_joined_and_punctuated_as_in_the_package(recorded: dict) -> None:
    assert [[joined_text(other, text) for other in ("", *SPOKEN)] for text in SPOKEN] == recorded["joined"]
    assert [with_punctuation(text) for text in SPOKEN] == recorded["punctuated"]


def test_durations_are_those_of_the_package(recorded: dict) -> None:
    found = [
        [
            estimated_frames(text, 25, None if reference is None else SpokenReference(*reference), speed=speed)
            for reference in REFERENCES
            for speed in SPEEDS
        ]
        for text in SPOKEN
    ]
    assert found == recorded["frames"]


def test_every_character_takes_as_long_as_in_the_package(recorded: dict) -> None:
    runs = recorded["weights"]
    for (first, weight), (following, _) in zip(runs, [*runs[1:], (0x110000, 0)], strict=True):
        step = max(1, (following - first) // 50)
        characters = map(chr, {*range(first, following, step), following - 1})
        known = [each for each in characters if ucd_3_2_0.category(each) != "Cn"]  # in every version of Python
        assert {speaking_weight(each) for each in known} <= {weight}, hex(first)


def test_the_first_piece_may_be_shorter() -> None:
    text = "One, two, three, four, five, six, seven, eight."
    assert pieces(text, 30) == ["One, two, three, four, five,", "six, seven, eight."]
    assert pieces(text, 30, first=6) == ["One,", "two, three, four, five, six,", "seven, eight."]
    assert pieces("", 30) == pieces(" \n ", 30) == []


def test_tags_are_parts_of_their_own() -> None:
    text = "Well [sigh] then[laughter][no tag]."
    assert nonverbal_parts(text) == ["Well ", "[sigh]", " then", "[laughter]", "[no tag]."]
    assert nonverbal_parts("") == []


def test_frames_follow_the_frame_rate() -> None:
    text = "Good morning to everybody in this house, and a happy new year to all of you."
    assert estimated_frames(text, 50) == pytest.approx(2 * estimated_frames(text, 25), abs=2)
    assert estimated_frames("", 25) == 1
    assert estimated_frames(text, 25, SpokenReference("", 10)) == estimated_frames(text, 25)
    assert estimated_frames(text, 25, SpokenReference("\u0640", 10)) == 1  # a reference of no length


def test_a_measured_pace_has_no_boost_for_short_texts() -> None:
    assert measured_pace([("three", 0.5), ("seven", 0.7), ("", 1.0), ("nine", 0.0)]) == pytest.approx((0.12, 0.0))
    line = [("a" * letters, 0.3 + 0.08 * letters) for letters in (5, 12, 30)]
    assert measured_pace(line) == pytest.approx((0.08, 0.3))
    assert measured_pace([("one", 3.0), ("eight seven", 1.0)]) == pytest.approx(((1 + 1 / 10.2) / 2, 0.0))  # no line
    assert measured_pace([]) is None
    assert estimated_frames("seven", 25, pace=Pace(0.1, 0.4)) == round((0.4 + 5 * 0.1) * 25)
    assert estimated_frames("seven", 25, pace=Pace(0.1), speed=2.0) == round(5 * 0.1 * 25 / 2)
    voice = SpokenReference("one", 30)
    assert estimated_frames("seven", 25, voice, pace=Pace(0.1)) == estimated_frames("seven", 25, voice)

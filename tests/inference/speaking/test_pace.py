"""How long texts take: as in the package `omnivoice` (tools/parity/record_speaking.py), or as the data of a model."""

from __future__ import annotations

import json
import random
from unicodedata import ucd_3_2_0

import numpy as np
import pytest

from erniekit.build.text_reading import Pace
from erniekit.inference.speaking.pace import SpokenReference, estimated_frames, measured_pace, speaking_weight
from tests.inference.speaking.speaking_cases import RECORDED, REFERENCES, SPEEDS, SPOKEN

SECONDS = {
    "zero": 0.45,
    "one": 0.30,
    "two": 0.25,
    "three": 0.35,
    "four": 0.32,
    "five": 0.42,
    "six": 0.48,
    "seven": 0.44,
}


@pytest.fixture(scope="module")
def recorded() -> dict:
    return json.loads((RECORDED / "texts.json").read_text(encoding="utf-8"))


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


def test_frames_follow_the_frame_rate() -> None:
    text = "Good morning to everybody in this house, and a happy new year to all of you."
    assert estimated_frames(text, 50) == pytest.approx(2 * estimated_frames(text, 25), abs=2)
    assert estimated_frames("", 25) == 1
    assert estimated_frames(text, 25, SpokenReference("", 10)) == estimated_frames(text, 25)
    assert estimated_frames(text, 25, SpokenReference("\u0640", 10)) == 1  # a reference of no length


def test_a_pace_that_was_measured_has_no_boost_for_short_texts() -> None:
    assert line_of([("three", 0.5), ("seven", 0.7), ("", 1.0), ("nine", 0.0)]) == by_length(0.12, 0.0)
    line = [("a" * letters, 0.3 + 0.08 * letters) for letters in (5, 12, 30)]
    assert line_of(line) == by_length(0.08, 0.3)
    assert line_of([("one", 3.0), ("eight seven", 1.0)]) == by_length((1 + 1 / 10.2) / 2, 0.0)  # no line
    assert measured_pace([]) is None
    assert estimated_frames("seven", 25, pace=Pace(0.1, 0.4)) == round((0.4 + 5 * 0.1) * 25)
    assert estimated_frames("seven", 25, pace=Pace(0.1), speed=2.0) == round(5 * 0.1 * 25 / 2)
    voice = SpokenReference("one", 30)
    assert estimated_frames("seven", 25, voice, pace=Pace(0.1)) == estimated_frames("seven", 25, voice)


def line_of(records: list[tuple[str, float]]) -> tuple[float, float]:
    """Return the seconds of a letter and those besides; letters do not differ in so few records."""
    pace = measured_pace(records)
    assert pace is not None
    assert not pace.letters
    return pace.seconds_per_letter, pace.seconds_besides


def by_length(seconds_per_letter: float, seconds_besides: float) -> object:
    return pytest.approx((seconds_per_letter, seconds_besides))


def said(count: int, seed: int) -> list[tuple[str, float]]:
    """Texts of two to five words, which take as long as their words do."""
    draw = random.Random(seed)
    texts = [draw.choices([*SECONDS], k=draw.randint(2, 5)) for _ in range(count)]
    return [(" ".join(text), 0.1 + sum(map(SECONDS.__getitem__, text))) for text in texts]


def error(pace: Pace, records: list[tuple[str, float]]) -> float:
    found = [estimated_frames(text, 1000, pace=pace) / 1000 - seconds for text, seconds in records]
    return float(np.abs(found).mean())


def test_letters_may_take_longer_than_others() -> None:
    """Words whose letters say little of their length: the seconds of texts that were not measured."""
    pace = measured_pace(said(200, seed=1))
    assert pace is not None
    others = said(100, seed=2)
    line = pace._replace(letters={})
    assert error(line, others) > 0.08
    assert error(pace, others) < 0.02
    assert estimated_frames("SIX TWO", 1000, pace=pace) == estimated_frames("six two", 1000, pace=pace)
    unknown = estimated_frames("q", 1000, pace=pace)
    assert unknown == round(1000 * (pace.seconds_besides + pace.seconds_per_letter))


def test_letters_count_only_where_they_tell_the_lengths_of_other_recordings() -> None:
    draw = random.Random(3)
    records = [(text, 0.3 + 0.07 * len(text) + draw.gauss(0, 0.2)) for text, _ in said(60, seed=4)]
    pace = measured_pace(records)
    assert pace is not None
    assert pace.letters == {}


def test_a_text_of_short_letters_takes_half_its_share_at_least() -> None:
    pace = Pace(0.1, 0.3, {"i": -0.2})
    assert estimated_frames("iiii", 100, pace=pace) == 30 + 20

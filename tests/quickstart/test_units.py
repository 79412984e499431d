"""The units of the quickstart: a rule that voices differ in, nothing held out trained on, and files that are fresh."""

from __future__ import annotations

import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from erniekit.config import Config
from erniekit.config.sections.vocabulary import expanded_tokens

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def make_units():
    sys.path.insert(0, str(ROOT / "tools/quickstart"))
    try:
        import make_units

        return make_units
    finally:
        sys.path.pop(0)


def test_voices_differ_and_digits_can_be_told_apart(make_units):
    words = [(word,) for word in make_units.DIGITS]
    for voice in range(make_units.VOICES):
        said = {tuple(chain(*make_units.units_of(word, voice))) for word in words}
        assert len(said) == len(words)
    voices = {tuple(chain(*make_units.units_of(words[3], voice))) for voice in range(make_units.VOICES)}
    assert len(voices) == make_units.VOICES
    after = [make_units.units_of(words[number] + words[4], 1)[1] for number in (0, 3)]
    assert after[0] != after[1]  # a phone depends on the one before it


def test_held_out_phrases_are_not_trained_and_the_same_bytes_come_again(make_units):
    files = make_units.files()
    assert files == make_units.files()

    def phrases(name):
        texts = [turn["content"] for record in files[name] for turn in record["messages"]]
        return {text.rpartition(": ")[2] for text in texts if isinstance(text, str)}

    assert phrases("eval-hear.jsonl") == phrases("eval-say.jsonl") and len(files["eval-hear.jsonl"]) == 200
    assert phrases("eval-say.jsonl").isdisjoint(phrases("train.jsonl"))


def test_the_configuration_has_a_token_for_every_unit(make_units):
    config = Config.load(ROOT / "examples/configs/quickstart/units.yaml")
    tokens = expanded_tokens(config.vocabulary.added_tokens, config.vocabulary.added_token_ranges)
    assert tokens == [f"<|unit{number}|>" for number in range(make_units.UNITS)]
    units = [part["units"] for each in make_units.files()["train.jsonl"] for turn in each["messages"]
             for part in (turn["content"] if isinstance(turn["content"], list) else []) if "units" in part]  # fmt: skip
    assert set(chain(*units)) <= set(range(make_units.UNITS)) and len(set(chain(*units))) > 70


def test_the_shipped_examples_are_fresh():
    command = [sys.executable, str(ROOT / "tools/quickstart/make_units.py"), "--examples", "--check"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0

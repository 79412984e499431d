"""Judges write down what is said; CMU Sphinx listens for the words of the texts only."""

from __future__ import annotations

import numpy as np
import pytest

from erniekit.errors import ConfigurationError
from erniekit.inference.speaking.judge import heard, open_judge, plain, words_of


def test_texts_become_words() -> None:
    assert plain("Don't say: \"No\", Mr. O'Neil — 3 times!") == "don't say no mr o'neil 3 times"
    assert words_of(["One two.", "two, THREE", "..."]) == ["one", "three", "two"]


def test_noise_is_no_word_and_silence_is_nothing() -> None:
    judge = open_judge("pocketsphinx", ["three five nine"])
    noise = 0.1 * np.random.default_rng(0).standard_normal(8000).astype(np.float32)
    heard = judge.write_down(noise, 8000)
    assert set(heard.split()) <= {"three", "five", "nine"}
    assert judge.write_down(noise, 8000) == heard
    assert judge.write_down(np.zeros(0, np.float32), 8000) == ""


def test_words_that_it_does_not_know_are_told() -> None:
    with pytest.raises(ConfigurationError, match="does not know qwrtz"):
        open_judge("pocketsphinx", ["one qwrtz"])
    with pytest.raises(ConfigurationError, match="no word to listen for"):
        open_judge("pocketsphinx", ["..."])


def test_what_is_heard_is_compared_with_the_text() -> None:
    class Hears:
        def write_down(self, sound: np.ndarray, sampling_rate: int) -> str:
            return "three five"

    sound = np.zeros(4, np.float32)
    assert heard(Hears(), "Three, five, nine!", sound, 8000) == 'heard: "three five" (WER 0.33)'

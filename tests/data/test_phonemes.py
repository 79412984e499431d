"""Phonemes by eSpeak NG, compared with what `espeak-ng --ipa -q -v LANGUAGE` prints (version 1.52)."""

from __future__ import annotations

import sys

import pytest

from erniekit.data import phonemes
from erniekit.data.formats.problems import MalformedError
from erniekit.data.phonemes import phonemes_of
from erniekit.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        ("hello world", "en", "həlˈoʊ wˈɜːld"),
        ("hello world", "en-gb", "həlˈəʊ wˈɜːld"),
        ("Hello, world!", "English", "həlˈoʊ, wˈɜːld!"),
        ("guten Tag", "de", "ɡˈuːtən tˈɑːk"),
        ("bonjour", "fr", "bɔ̃ʒˈuʁ"),
    ],
)
def test_phonemes_are_those_of_the_program(text: str, language: str, expected: str) -> None:
    assert phonemes_of(text, language) == expected


def test_punctuation_stays_and_languages_do_not_disturb_each_other() -> None:
    before = phonemes_of("one; two … three?", "en")
    assert phonemes_of("eins", "de") != phonemes_of("eins", "en")
    assert phonemes_of("one; two … three?", "en") == before
    assert before.index(";") < before.index("…") < before.index("?")
    assert phonemes_of("3.5", "en").split()[1] == "pɔɪnt"
    assert phonemes_of("", "en") == "" and phonemes_of("...", "en") == "..."


def test_what_cannot_be_spoken_is_told() -> None:
    with pytest.raises(MalformedError) as refused:
        phonemes_of("東京", "ja")
    assert refused.value.expected == "a text in kana, because eSpeak NG does not read kanji"


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    phonemes._library.cache_clear()
    with pytest.raises(ConfigurationError, match=r"pip install 'erniekit\[speech-data\]'"):
        phonemes_of("a", "en")
    phonemes._library.cache_clear()

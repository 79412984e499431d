"""Words that a published model does not know are told, with the nearest one that it knows."""

from __future__ import annotations

import pytest

from erniekit.inference.speaking.voice_words import WORDS, doubt, language_doubt


@pytest.mark.parametrize("instruct", ["", "Female, low pitch, british accent", "女，耳语，四川话", "child,"])
def test_known_words_raise_no_doubt(instruct: str) -> None:
    assert doubt(instruct) == ""


@pytest.mark.parametrize(
    ("instruct", "told"),
    [
        ("femal", "'femal' is no word that the model was trained with; did you mean female?"),
        ("male, zzzzzz", "'zzzzzz' is no word that the model was trained with; it knows male, female, child"),
        ("male, female", "male and female contradict each other"),
        ("low pitch, 高音调", "low pitch and 高音调 contradict each other"),
        ("british accent, 四川话", "british accent and 四川话 contradict each other"),
    ],
)
def test_doubts_are_told(instruct: str, told: str) -> None:
    assert doubt(instruct).startswith(told)


def test_there_are_as_many_words_as_in_the_package() -> None:
    assert len(WORDS) == 2 * (2 + 5 + 5 + 1) + 10 + 12


@pytest.mark.parametrize("language", ["en", "yue"])
def test_codes_of_languages_raise_no_doubt(language: str) -> None:
    assert language_doubt(language) == ""


@pytest.mark.parametrize("language", ["English", "EN", "en-us"])
def test_other_words_for_languages_do(language: str) -> None:
    assert language_doubt(language).startswith(f"{language!r} is no code of a language, such as en or yue")

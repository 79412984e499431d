"""Tokens become text as it is certain, up to the first stop word."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from erniekit.serving.text_pieces import GrowingText, StopWords


def utf8(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


@given(st.text(max_size=40))
def test_pieces_joined_are_the_text(text: str) -> None:
    growing = GrowingText(utf8)
    pieces = [growing.add(byte) for byte in text.encode()]
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert "".join(pieces) + growing.rest() == text


def test_a_character_that_never_ends_is_told_at_the_end() -> None:
    growing = GrowingText(utf8)
    assert [growing.add(byte) for byte in "aä".encode()[:2]] == ["a", ""]
    assert growing.rest() == "\ufffd"


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_words_end_a_text_however_it_is_cut(text: str, words: list[str], data: st.DataObject) -> None:
    stops, told, place = StopWords(words), "", 0
    found = False
    while place < len(text) and not found:
        length = data.draw(st.integers(1, 5))
        piece, found = stops.add(text[place : place + length])
        told, place = told + piece, place + length
    told += "" if found else stops.rest()
    ends = [text.index(word) for word in words if word in text]
    if not ends:
        assert told == text and not found
    else:
        assert found
        assert told == text[: min(ends)] or any(told == text[:end] for end in ends)


def test_what_may_be_a_stop_word_waits() -> None:
    stops = StopWords(["</end>"])
    assert stops.add("one <") == ("one ", False)
    assert stops.add("b>") == ("<b>", False)
    assert stops.add("</e") == ("", False)
    assert stops.add("nd>more") == ("", True)


@pytest.mark.parametrize("words", [(), ("y",)])
def test_nothing_is_held_back_without_cause(words: tuple[str, ...]) -> None:
    assert StopWords(words).add("text") == ("text", False)

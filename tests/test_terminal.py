"""What others wrote cannot steer the terminal."""

from __future__ import annotations

from erniekit.terminal import escape_control_characters


def test_control_characters_are_shown_not_obeyed() -> None:
    assert escape_control_characters("\x1b[2J\x07\r\x7f\x9b1m\x00") == r"\x1b[2J\x07\x0d\x7f\x9b1m\x00"


def test_other_text_is_left_as_it_is() -> None:
    text = "Größe\t1\n你好 🙂 \\ é"
    assert escape_control_characters(text) == text

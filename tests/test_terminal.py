"""What others wrote cannot steer the terminal, and its edge breaks no words."""

from __future__ import annotations

import io
import logging

import pytest

from erniekit.log import console_logging
from erniekit.terminal import colours_of, escape_control_characters, wrapped


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_break_between_words_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    path = "/" + "folder/" * 6 + "file-with-hyphens.jsonl"
    text = f"short  line\n  a line of many words, and {path} stays whole"
    assert wrapped(text, io.StringIO()) == text
    shown = wrapped(text, Terminal())
    assert shown.splitlines() == [
        "short  line",
        "  a line of many words, and",
        f"      {path}",
        "      stays whole",
    ]
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    with console_logging():
        logging.getLogger("erniekit.x").info("a line of many words that reaches the edge")
    assert max(map(len, terminal.getvalue().splitlines())) <= 30


def test_control_characters_are_shown_not_obeyed() -> None:
    assert escape_control_characters("\x1b[2J\x07\r\x7f\x9b1m\x00") == r"\x1b[2J\x07\x0d\x7f\x9b1m\x00"


def test_other_text_is_left_as_it_is() -> None:
    text = "Größe\t1\n你好 🙂 \\ é"
    assert escape_control_characters(text) == text


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert colours_of(Terminal()).first("x") == "\x1b[1;32mx\x1b[0m"
    assert colours_of(io.StringIO()).first("x") == "x"
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert colours_of(Terminal()).second("x") == "x"

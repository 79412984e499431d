"""The commands of `erniekit chat`, and that no message ends it. No model: the answers are made up."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import pytest

from erniekit.cli import main
from erniekit.errors import DataError
from erniekit.inference import engine


class FakeDialogue:
    """Answers with what it has heard since it began."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def reply(self, message: str, sampling: object) -> Iterator[str]:
        if message == "fail":
            raise DataError("the message cannot be answered")
        if message == "wait":
            yield "I"
            raise KeyboardInterrupt
        self.heard.append(message)
        yield "+".join(self.heard)


def chat(words: Iterable[str], monkeypatch: pytest.MonkeyPatch, *, terminal: bool = True) -> int:
    lines = iter(words)

    def read(prompt: str = "") -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("erniekit.cli.chat.load_model", lambda options, parameters: None)
    monkeypatch.setattr(engine, "Dialogue", SimpleNamespace(start=lambda model, **options: FakeDialogue()))
    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: terminal, raising=False)
    return main(["chat", "model"])


@pytest.mark.parametrize("word", ["/exit", "/quit", "exit", "quit"])
def test_words_that_leave(word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(["a", word, "b"], monkeypatch) == 0
    out = capsys.readouterr().out
    assert "model> a\n" in out and "b" not in out.split("model> a")[1]


def test_commands_are_not_sent_to_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(["a", "b", "/help", "/clear", "c", "/hlep", "/usr/bin is a path"], monkeypatch) == 0
    shown = capsys.readouterr()
    assert shown.out.count("/clear starts a new dialogue") == 2
    assert [line for line in shown.out.splitlines() if line.startswith("model> ")] == [
        "model> a", "model> a+b", "model> c", "model> c+/usr/bin is a path",
    ]  # fmt: skip
    assert "/hlep: no command" in shown.err


def test_neither_an_error_nor_ctrl_c_in_an_answer_ends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(["fail", "wait", "a"], monkeypatch) == 0
    shown = capsys.readouterr()
    assert "error: the message cannot be answered" in shown.err
    assert "cut short" in shown.out and "model> a\n" in shown.out
    assert chat(["wait", "a"], monkeypatch, terminal=False) == 130


def test_a_pipe_gets_answers_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(["a", "b"], monkeypatch, terminal=False) == 0
    assert capsys.readouterr().out == "a\na+b\n"

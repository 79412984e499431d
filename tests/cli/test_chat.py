"""The commands of `erniekit chat`, and that no message ends it. No model: the answers are made up."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from erniekit.cli import main
from erniekit.data.media.clip import Clip
from erniekit.errors import DataError
from erniekit.inference import engine


class FakeDialogue:
    """Answers with what it has heard since it began."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def reply(self, message: str, sampling: object, clips: Sequence[Clip] = ()) -> Iterator[str]:
        message = "".join(f"[{Path(clip.path).name}]" for clip in clips) + message
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


def test_recordings_stand_before_the_next_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.wav", "b c.wav"):
        (tmp_path / name).write_text("sound")
    words = [f"/audio {tmp_path}/a.wav", f"/audio {tmp_path}/b c.wav", "/audio absent.wav", "both?", "next"]
    assert chat(words, monkeypatch) == 0
    shown = capsys.readouterr()
    assert "model> [a.wav][b c.wav]both?\n" in shown.out and shown.out.rstrip().endswith("both?+next")
    assert "error: absent.wav: no such file" in shown.err

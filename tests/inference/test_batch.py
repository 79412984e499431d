"""`erniekit generate --prompts FILE`: the answers that each prompt gets alone, in the order of the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from erniekit.cli import main
from erniekit.data.placeholders import EncodedPrompt
from erniekit.inference import batch
from erniekit.inference.engine import ChatModel
from erniekit.inference.prompts import read_prompts
from erniekit.inference.sampling import Sampling

QUESTIONS = [f"What is {number} + {number * 7}?" + " Think." * (number % 5) for number in range(11)]


@pytest.fixture
def output(train: Callable[..., Any]) -> Path:
    return train().output


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(QUESTIONS), encoding="utf-8")
    return path


@pytest.mark.parametrize("temperature", ["0", "1.5"])
def test_answers_are_those_of_the_prompts_given_as_words(
    output: Path,
    prompts: Path,
    tmp_path: Path,
    temperature: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sampling = Sampling(max_new_tokens=6, temperature=float(temperature), seed=42, top_p=0.7)
    expected = ChatModel.load(output).answer(QUESTIONS, sampling)
    monkeypatch.setattr(batch, "WINDOW", 4)
    target = tmp_path / "answers.jsonl"
    words = ["generate", str(output), "--prompts", str(prompts), "--output", str(target), "--max-new-tokens", "6"]
    assert main([*words, "--temperature", temperature]) == 0
    records = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert records == [{"prompt": text, "answer": answer} for text, answer in zip(QUESTIONS, expected, strict=True)]
    shown = capsys.readouterr()
    assert "answered 4 of 11 prompts" in shown.err and "answered 11 of 11 prompts" in shown.err
    assert main([*words, "--temperature", temperature]) == 2
    assert "already exists" in capsys.readouterr().err


def test_dialogues_bring_their_turns_and_references(
    output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "dialogues.jsonl"
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "R"},
    ]
    records = [{"messages": messages}, {"src": "Q", "tgt": "A"}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["generate", str(output), "--prompts", str(path), "--max-new-tokens", "3", "--temperature", "0"]
    assert main(words) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["prompt"] == "R" and first["messages"] == messages and "reference" not in first
    assert second["reference"] == "A" and "messages" not in second
    assert main([*words, "--system", "S"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["answer"] == first["answer"]
    assert main([*words, "--raw"]) == 2
    assert f"{path}:1: the record is a dialogue" in capsys.readouterr().err


def test_prompts_that_cannot_be_answered_are_all_told_first(
    output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, target = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    path.write_text("Hello </s>\n" + "days " * 100 + "\n" + "count " * 100 + "\n")
    words = ["generate", str(output), "--prompts", str(path), "--output", str(target), "--max-model-len", "64"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert f"{path}:2: " in error and f"{path}:3: " in error and "max_model_len 64" in error
    assert "the text contains </s>; it is read as ordinary text" in error and f"{path}:1: " not in error
    assert not target.exists()


def test_a_record_keeps_its_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"tools": [{"name": "add"}], "messages": [{"role": "user", "content": "1 + 2?"}]}))
    seen: list[Any] = []
    monkeypatch.setattr("erniekit.inference.batch.check_prompt", lambda *_: None)
    model = SimpleNamespace(encode=lambda conversation: seen.append(conversation) or EncodedPrompt([1]), decoder=None)
    batch.encode_prompts(model, read_prompts(path), path, None, system="Be brief.")
    assert seen[0].tools == ({"name": "add"},) and seen[0].system == "Be brief."


def test_an_interruption_leaves_no_answers_that_look_complete(
    output: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(ChatModel, "answer_encoded", interrupted)
    target = tmp_path / "answers.jsonl"
    assert main(["generate", str(output), "--prompts", str(prompts), "--output", str(target)]) == 130
    assert not target.exists() and not list(tmp_path.glob(".writing*"))


def test_words_that_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "model"]) == 2
    assert main(["generate", "model", "--prompt", "x", "--prompts", "y"]) == 2
    assert main(["generate", "model", "--prompt", "x", "--output", "z"]) == 2
    assert "--output needs --prompts FILE" in capsys.readouterr().err


def test_control_characters_do_not_reach_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    batch.write_record({"answer": "a\x1b[2J\x9b\x7f"}, sys.stdout)
    line = capsys.readouterr().out
    assert line.rstrip("\n").isprintable() and json.loads(line) == {"answer": "a\x1b[2J\x9b\x7f"}

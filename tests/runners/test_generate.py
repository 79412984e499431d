"""Asking a model: batches, streaming, dialogues, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.cli import main
from erniekit.errors import DataError, ModelFileError
from erniekit.model.sampling import Sampling
from erniekit.runners.generate import ChatModel, Dialogue

PROMPTS = ["What is 1 + 1?", "Sort 3, 2, 1 in ascending order.", "Reverse a b.", "Hello"]
GREEDY = Sampling(max_new_tokens=12)


@pytest.fixture
def output(train: Callable[..., Any]) -> Path:
    return train(save_strategy="steps", save_steps=4).output


@pytest.fixture
def model(tiny_model: Path) -> ChatModel:
    """Random weights answer more variedly than four steps of training do."""
    return ChatModel.load(tiny_model, random_weights=True)


def test_answers_do_not_depend_on_the_batch(model: ChatModel) -> None:
    together = model.answer(PROMPTS, GREEDY)
    assert together == [model.answer([prompt], GREEDY)[0] for prompt in PROMPTS]


def test_streaming_gives_the_same_text(model: ChatModel) -> None:
    tokens = model.tokenizer.encode("What is 1 + 1?")
    raw = model.answer(["What is 1 + 1?"], GREEDY, raw=True)[0]
    assert "".join(model.stream(tokens, GREEDY)) == raw


def test_a_checkpoint_is_a_model_folder(output: Path, model: ChatModel) -> None:
    final, checkpoint = ChatModel.load(output), ChatModel.load(output / "checkpoint-4")
    assert checkpoint.answer(PROMPTS, GREEDY) == final.answer(PROMPTS, GREEDY) != model.answer(PROMPTS, GREEDY)


def test_system_text_matters(model: ChatModel) -> None:
    assert model.answer(PROMPTS, GREEDY, system="Count down.") != model.answer(PROMPTS, GREEDY)


def test_a_dialogue_remembers_and_forgets(model: ChatModel) -> None:
    dialogue = Dialogue.start(model, system="Be brief.", max_model_len=64)
    for number in range(4):
        answer = "".join(dialogue.reply(f"What is {number} + 1?", Sampling(max_new_tokens=8)))
        assert dialogue.conversation.turns[-1].content == answer
    turns = dialogue.conversation.turns
    assert len(model.encode(dialogue.conversation)) <= 64
    assert 2 <= len(turns) < 8  # the oldest exchanges are gone
    assert turns[-2].content == "What is 3 + 1?"
    assert dialogue.conversation.system == "Be brief."


def test_a_message_that_leaves_no_room_is_refused(model: ChatModel) -> None:
    dialogue = Dialogue.start(model, max_model_len=16)
    with pytest.raises(DataError, match="max_model_len"):
        list(dialogue.reply("count " * 40, GREEDY))
    assert dialogue.conversation.turns == ()


def test_control_tokens_are_refused(model: ChatModel) -> None:
    with pytest.raises(DataError, match="</s>"):
        model.answer(["Forget </s> everything"], GREEDY)


def test_wrong_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such folder"):
        ChatModel.load(tmp_path / "absent")
    (tmp_path / "checkpoint-7").mkdir()
    with pytest.raises(ModelFileError, match="checkpoint-7"):
        ChatModel.load(tmp_path)


def test_the_verbs(output: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["generate", str(output), "--temperature", "0", "--max-new-tokens", "5"]
    assert main([*arguments, "--prompt", "Hello", "--prompt", "What?"]) == 0
    assert capsys.readouterr().out.startswith("> Hello\n")
    assert main([*arguments, "--prompt", "Hello", "--top-p", "0"]) == 2
    assert "`top_p`" in capsys.readouterr().err

    lines = iter(["Hello", "Bad </s> message", "/new", "What?"])

    def answer(prompt: str = "") -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", answer)
    assert main(["chat", str(output), "--temperature", "0", "--max-new-tokens", "5"]) == 0
    assert "</s>" in capsys.readouterr().err

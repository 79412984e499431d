"""Proofs of section 3.1: how answers are sampled and where they end."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.cli import main
from erniekit.config import Config
from erniekit.errors import UserError
from tests.config.samples import load

PROMPT = "What is 1 + 1?"
SAMPLED = {"temperature": 1.5, "top_p": 1.0, "max_new_tokens": 12}
Answer = Callable[..., list[int]]


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    """Random weights answer more variedly than a few steps of training do."""
    from erniekit.inference.engine import ChatModel

    return ChatModel.load(tiny_model, random_weights=True)


@pytest.fixture
def answer(model: Any) -> Answer:
    """The tokens of an answer to the text, as `erniekit generate` would sample them."""
    from erniekit.inference.engine import sampling_from
    from erniekit.inference.generation import generate

    def sample(stream: int = 0, **values: Any) -> list[int]:
        words = [f"{name}={value}" for name, value in {**SAMPLED, **values}.items()]
        config = Config.load(None, words, verb="generate")
        sampling = sampling_from(config.generation, config.training.seed)
        prompt = model.tokenizer.encode(PROMPT)
        (found,) = generate(model.decoder, [prompt], sampling, streams=[stream])
        return found

    return sample


@pytest.mark.proves("max_new_tokens", "max_model_len")
def test_where_an_answer_ends(answer: Answer, model: Any) -> None:
    assert [len(answer(max_new_tokens=count)) for count in (3, 12)] == [3, 12]
    length = len(model.tokenizer.encode(PROMPT))
    assert len(answer(max_model_len=length + 5)) == 5
    with pytest.raises(UserError, match=f"max_model_len {length}"):
        from erniekit.inference.engine import sampling_from

        config = Config.load(None, [f"max_model_len={length}"], verb="generate")
        model.answer([PROMPT], sampling_from(config.generation, 1), raw=True)


@pytest.mark.proves("temperature", "seed")
def test_how_freely_tokens_are_chosen(answer: Answer) -> None:
    greedy = answer(temperature=0)
    assert greedy == answer(temperature=0, seed=7) == answer(temperature=0.001)
    assert answer() == answer() != answer(seed=7)
    assert answer(temperature=1.5) != greedy


@pytest.mark.proves("seed", "temperature")
@pytest.mark.parametrize("verb", ["generate", "generate a file", "chat"])
def test_the_seed_of_the_command_line_decides_answers(
    verb: str, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from erniekit.inference.engine import ChatModel

    monkeypatch.setattr(ChatModel, "load", lambda *arguments, **options: model)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{PROMPT}\n")
    words = {"generate": ["--prompt", PROMPT], "generate a file": ["--prompts", str(prompts)], "chat": []}[verb]

    def answered(seed: int, temperature: float = 1.5) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\n"))
        options = ["--temperature", str(temperature), "--max-new-tokens", "12", "--seed", str(seed)]
        assert main([verb.split()[0], "a model", *words, *options]) == 0
        return capsys.readouterr().out

    assert answered(7) == answered(7) != answered(8)
    assert answered(7, temperature=0) == answered(8, temperature=0)


@pytest.mark.proves("top_p", "top_k")
def test_from_how_many_tokens_is_chosen(answer: Answer) -> None:
    greedy = answer(temperature=0)
    assert answer(top_k=1) == greedy == answer(top_p=1e-6)

    def firsts(**values: Any) -> int:
        """How many different tokens begin the answers of many streams."""
        return len({answer(stream, max_new_tokens=1, **values)[0] for stream in range(24)})

    assert 1 < firsts(top_k=3) <= 3 < firsts(top_k=0)
    assert 1 < firsts(top_p=0.02) < firsts(top_p=1.0)


@pytest.mark.proves("repetition_penalty")
def test_tokens_that_have_appeared_become_less_likely(answer: Answer, model: Any) -> None:
    def repeated(tokens: list[int]) -> int:
        seen, count = set(model.tokenizer.encode(PROMPT)), 0
        for token in tokens:
            count += token in seen
            seen.add(token)
        return count

    usual = {"temperature": 0, "max_new_tokens": 40}
    assert repeated(answer(**usual, repetition_penalty=3.0)) < repeated(answer(**usual))


def test_the_port_is_reported_where_nothing_listens() -> None:
    assert any("`port`" in line and "it applies to server" in line for line in load(port=9000).messages)

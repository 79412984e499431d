"""Proofs of the parameters of spoken dialogues: which template renders, with which tokens, and who needs none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from erniekit.build.data import training_dataset
from erniekit.build.model import open_tokenizer
from erniekit.cli.generate import _speech
from erniekit.config import Config
from erniekit.data.templates.ernie import IGNORE_INDEX
from erniekit.errors import UserError
from tests.data.unit_vocabularies import write_unit_tokenizer

MakeConfig = Callable[..., Config]


@pytest.fixture
def trained(make_config: MakeConfig, tmp_path: Path) -> Callable[..., str]:
    """Return a function that returns what the one dialogue of a data file trains."""
    folder = write_unit_tokenizer(tmp_path / "model", "lines")
    content = [[{"units": [1, 2]}, {"text": "how many?"}], [{"text": "six"}, {"units": [3]}]]
    messages = [{"role": role, "content": each} for role, each in zip(("user", "assistant"), content, strict=True)]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": messages}), encoding="utf-8")

    def read(**values: Any) -> str:
        config = make_config(
            model_name_or_path=str(folder), train_dataset_path=str(tmp_path / "data.jsonl"),
            train_dataset_type="messages", max_seq_len=512, **values,
        )  # fmt: skip
        tokenizer, template = open_tokenizer(config)
        labels = training_dataset(config, tokenizer, template).sample(0).labels.tolist()
        return tokenizer.decode([label for label in labels if label != IGNORE_INDEX], skip_special_tokens=False)

    return read


@pytest.mark.proves("dialogue_template")
def test_the_template_of_spoken_dialogues_needs_no_chat_template(trained: Callable[..., str]) -> None:
    with pytest.raises(UserError, match=r"no chat template .*dialogue_template: spoken needs none"):
        trained()
    assert trained(dialogue_template="usdm") == "how many?\nsix<|correspond|><|unit3|>"
    assert trained(dialogue_template="spoken") == "how many?\nsix<|correspond|><|unit3|>\n"


@pytest.mark.proves("unit_token")
@pytest.mark.proves("correspond_token")
def test_the_tokens_of_the_template_are_those_that_are_named(trained: Callable[..., str]) -> None:
    marks = {"correspond_token": "<|continue|>", "continue_token": "<|correspond|>"}
    said = trained(dialogue_template="usdm", unit_token="<|unit1{}|>", **marks)
    assert said == "how many?\nsix<|continue|><|unit13|>"


def test_a_command_that_says_nothing_takes_what_the_trained_folder_says() -> None:
    assert _speech(Config.load(None, [], verb="generate")) is None
    speech = _speech(Config.load(None, ["dialogue_template=spoken"], verb="generate"))
    assert speech is not None and speech.dialogue_template == "spoken"


def test_ready_tokens_need_no_template(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = write_unit_tokenizer(tmp_path / "model", "lines")
    (tmp_path / "data.txt").write_text("1 5 6|-100 5 6\n", encoding="utf-8")
    config = make_config(
        model_name_or_path=str(folder), train_dataset_path=str(tmp_path / "data.txt"), train_dataset_type="token_ids"
    )
    tokenizer, template = open_tokenizer(config)
    assert template is None
    assert training_dataset(config, tokenizer, template).sample(0).labels.tolist() == [5, 6]

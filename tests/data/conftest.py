"""A small tokenizer of our own with ERNIE-4.5's control tokens, and helpers to write data files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from erniekit.data.conversation import Source
from erniekit.data.templates.ernie import chat_template
from erniekit.data.tokenizers.tokenizer import load_tokenizer

SENTENCES = [
    "The river runs past the old mill and under the bridge.",
    "User: how many apples are left when three of nine are eaten?\nAssistant: six apples are left.",
    "Count from one to ten, then sort the words by length.",
    "Winter days are short, summer days are long; 12 + 30 = 42.",
    "Die Mühle steht am Fluss. 今天天气很好。",
] * 4
MASK_TOKENS = tuple(f"<mask:{number}>" for number in range(8))
CONTROL_TOKENS = ("<unk>", "<s>", "</s>", "<|begin_of_sentence|>", "<|end_of_sentence|>", *MASK_TOKENS)


def write_tokenizer(folder: Path, control_tokens: tuple[str, ...] = CONTROL_TOKENS, **config: object) -> Path:
    """A byte-level BPE of about 500 tokens; `config` adds to (or, as None, removes from) tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(control_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.save(str(folder / "tokenizer.json"))
    values = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>", "unk_token": "<unk>", **config}
    kept = {name: value for name, value in values.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    return load_tokenizer(tokenizer_folder)


@pytest.fixture(scope="session")
def template(tokenizer):
    return chat_template(tokenizer)


@pytest.fixture
def write_jsonl(tmp_path) -> Callable[..., Path]:
    def write(records: list, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        lines = [record if isinstance(record, str) else json.dumps(record, ensure_ascii=False) for record in records]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return write


@pytest.fixture
def make_source(write_jsonl) -> Callable[..., Source]:
    def make(records: list, kind: str = "erniekit", probability: float = 1.0, name: str = "data.jsonl") -> Source:
        return Source(write_jsonl(records, name), kind, probability)

    return make

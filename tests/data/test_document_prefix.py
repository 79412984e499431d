"""The tokens that a tokenizer puts before a text: in plain documents and raw prompts, never in dialogues."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from erniekit.data.open_dataset import open_dataset
from erniekit.data.templates.ernie import chat_template, encode_sample
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from tests.data.conftest import write_tokenizer
from tests.data.test_formats import EXCHANGE
from tests.data.vocabularies import NAMED, write_sentencepiece

BOS, EOS = ({"SpecialToken": {"id": token, "type_id": 0}} for token in ("<s>", "</s>"))
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
ORDERS = {"BOS": [BOS, TEXT], "nothing": [TEXT], "EOS": [TEXT, EOS], "both": [BOS, TEXT, EOS]}


def write_post_processor(folder: Path, order: list[dict]) -> Path:
    write_tokenizer(folder)
    stored = json.loads((folder / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in stored["added_tokens"]}
    named = {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in ("<s>", "</s>")}
    stored["post_processor"] = {"type": "TemplateProcessing", "single": order, "pair": order, "special_tokens": named}
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    return folder


@pytest.mark.parametrize("order", ORDERS)
def test_documents_begin_as_the_post_processor_says(order, tmp_path, make_source):
    tokenizer = load_tokenizer(write_post_processor(tmp_path / "tokenizer", ORDERS[order]))
    prefix = [tokenizer.bos_id] if order in ("BOS", "both") else []
    assert list(tokenizer.document_prefix) == prefix
    text = "The river runs past the old mill"
    source = make_source([{"text": text}, {"text": "mill " * 150}], "text")
    dataset = open_dataset([source], tokenizer, None, max_seq_len=64, cache_dir=tmp_path / "cache")
    ids = [*prefix, *tokenizer.encode(text), tokenizer.eos_id]  # one end, whatever the tokenizer would add
    assert dataset.sample(0).input_ids.tolist() == ids[:-1]
    assert dataset.sample(0).labels.tolist() == ids[1:]
    first, second = dataset.sample(1), dataset.sample(2)  # a long document has one beginning
    assert first.input_ids.tolist().count(tokenizer.bos_id) == len(prefix)
    assert tokenizer.bos_id not in second.input_ids.tolist()


def test_a_dialogue_has_the_tokens_of_its_template_only(tmp_path, tokenizer):
    adding = load_tokenizer(write_post_processor(tmp_path, ORDERS["both"]))
    samples = [encode_sample(chat_template(each), each, EXCHANGE).input_ids.tolist() for each in (adding, tokenizer)]
    assert samples[0] == samples[1]


@pytest.mark.parametrize(
    ("settings", "added"),
    [
        ({"tokenizer_class": "LlamaTokenizer"}, True),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}, True),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, False),
        ({"tokenizer_class": "Ernie4_5_Tokenizer"}, False),
    ],
)
def test_sentencepiece_models_follow_their_class(tmp_path, settings, added):
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path, config={**NAMED, **settings}))
    assert tokenizer.document_prefix == ((tokenizer.bos_id,) if added else ())


def test_the_token_cache_knows_the_prefix(tmp_path, make_source):
    source = make_source([{"text": "six"}], "text")
    plain, adding = (load_tokenizer(write_post_processor(tmp_path / name, ORDERS[name])) for name in ("nothing", "BOS"))
    lengths = [
        len(open_dataset([source], each, None, max_seq_len=64, cache_dir=tmp_path / "cache").sample(0).input_ids)
        for each in (plain, adding)
    ]
    assert lengths[1] == lengths[0] + 1

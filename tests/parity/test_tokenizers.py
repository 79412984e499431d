"""Folders without tokenizer.json against transformers' slow tokenizers: ids, special tokens, round trips.

`python -m tests.parity.test_tokenizers` records the ids and the small model that the plain run checks.
"""

from __future__ import annotations

import base64
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.data.conversation import ASSISTANT, USER, Conversation, Turn
from erniekit.data.templates.ernie import chat_template, encode_prompt
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from tests.data.test_sentencepiece_tokenizer import RECORDED
from tests.data.vocabularies import (
    BEGIN,
    BYTE_PAIR_TEXTS,
    END,
    ERNIE,
    MASKS,
    NAMED,
    TEXTS,
    write_byte_pairs,
    write_sentencepiece,
)

pytestmark = pytest.mark.parity

KINDS = {
    "without dummy prefix": {},
    "with dummy prefix": {"add_dummy_prefix": True},
    "normalising": {
        "add_dummy_prefix": True, "normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True,
    },
    "unigram": {"model_type": "unigram", "vocab_size": 90, "add_dummy_prefix": True, "byte_fallback": False},
}  # fmt: skip
MODES = [(True, True), (False, True), (False, False)]  # legacy, add_prefix_space
PIECES = st.sampled_from([*MASKS[:3], "<s>", "</s>", BEGIN, END, " ", "  ", "\n", "six", "apples", "ü", "🦆", "▁", "."])


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    made = {}

    def load(kind: str, legacy: bool, prefix: bool):
        if (kind, legacy, prefix) not in made:
            config = {"tokenizer_class": "LlamaTokenizer", **NAMED, **ERNIE, "additional_special_tokens": [*MASKS[4:]]}
            config |= {"legacy": legacy, "add_prefix_space": prefix, "add_bos_token": False}
            folder = write_sentencepiece(tmp_path_factory.mktemp("spm"), config=config, **KINDS[kind])
            theirs = transformers.LlamaTokenizer.from_pretrained(str(folder))
            made[kind, legacy, prefix] = load_tokenizer(folder), theirs
        return made[kind, legacy, prefix]

    return load


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("legacy", "prefix"), MODES)
def test_ids_and_texts_equal_those_of_transformers(both, kind, legacy, prefix):
    ours, theirs = both(kind, legacy, prefix)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        # beside special tokens transformers adds spaces, and at the beginning it drops one that was there
        special = any(token in text for token in theirs.all_special_tokens) or ours.token_id("<unk>") in ids
        if not special and text[:1] not in (" ", "▁"):
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.encode_batch(TEXTS) == [ours.encode(text) for text in TEXTS]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("legacy", "prefix"), MODES)
def test_composed_texts_have_the_same_ids(both, kind, legacy, prefix):
    ours, theirs = both(kind, legacy, prefix)

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.lists(PIECES, max_size=8))
    def check(parts):
        text = "".join(parts)
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)

    check()


def test_named_tokens_and_the_size_are_the_same(both):
    ours, theirs = both("without dummy prefix", True, True)
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    assert ours.vocab_size == len(theirs)
    assert ours.control_tokens == set(theirs.all_special_tokens)
    for token in (*theirs.all_special_tokens, *MASKS, "six"):
        expected = theirs.convert_tokens_to_ids(token)
        assert ours.token_id(token) == (None if expected == theirs.unk_token_id and token != "<unk>" else expected)


def test_ernies_dialogues_have_the_ids_that_transformers_gives_their_text(both):
    ours, theirs = both("without dummy prefix", True, True)
    template = chat_template(ours)
    asked = Conversation((Turn(USER, "how many apples are left?"),), "Count.")
    text = f"{BEGIN}Count.\nUser: how many apples are left?\nAssistant: "
    assert encode_prompt(template, ours, asked) == theirs.encode(text, add_special_tokens=False)
    longer = Conversation((*asked.turns, Turn(ASSISTANT, "six "), Turn(USER, " and now?")), "Count.")
    segments = [text, f"six {END}", "User:  and now?\nAssistant: "]
    expected = [token for part in segments for token in theirs.encode(part, add_special_tokens=False)]
    assert encode_prompt(template, ours, longer) == expected


@pytest.mark.slow
@pytest.mark.skipif(find_spec("paddlenlp") is None, reason="needs paddlenlp")
@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "GPT2Tokenizer"])
def test_byte_pairs_through_paddlenlp_equal_transformers(name, tmp_path):
    folder = write_byte_pairs(tmp_path, name)
    ours, theirs = load_tokenizer(folder), getattr(transformers, name).from_pretrained(str(folder))
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    assert ours.vocab_size == len(theirs)
    plain = {"spaces_between_special_tokens": False, "clean_up_tokenization_spaces": False}
    for text in BYTE_PAIR_TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, **plain)
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_the_recorded_ids_are_those_of_transformers(tmp_path):
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    for name, case in recorded["cases"].items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "tokenizer.model").write_bytes(base64.b64decode(recorded["models"][case["model"]]))
        (folder / "tokenizer_config.json").write_text(json.dumps(case["config"]))
        theirs = transformers.LlamaTokenizer.from_pretrained(str(folder))
        assert case["ids"] == [theirs.encode(text, add_special_tokens=False) for text in recorded["texts"]]


def record(folder: Path) -> dict:
    import sentencepiece

    recorded = {"made_with": f"transformers {transformers.__version__}, sentencepiece {sentencepiece.__version__}"}
    models, cases = {}, {}
    for kind, training in (("without", {}), ("with", {"add_dummy_prefix": True})):
        models[kind] = base64.b64encode(
            (write_sentencepiece(folder / kind, **training) / "tokenizer.model").read_bytes()
        ).decode()
        for legacy, prefix in MODES:
            config = {"tokenizer_class": "LlamaTokenizer", **NAMED, **ERNIE, "legacy": legacy}
            config |= {"add_prefix_space": prefix, "add_bos_token": False}
            (folder / kind / "tokenizer_config.json").write_text(json.dumps(config))
            theirs = transformers.LlamaTokenizer.from_pretrained(str(folder / kind))
            ids = [theirs.encode(text, add_special_tokens=False) for text in TEXTS]
            cases[f"{kind}-{legacy}-{prefix}"] = {"model": kind, "config": config, "ids": ids}
    return {**recorded, "texts": TEXTS, "models": models, "cases": cases}


if __name__ == "__main__":
    import tempfile

    RECORDED.write_text(json.dumps(record(Path(tempfile.mkdtemp())), ensure_ascii=False) + "\n", encoding="utf-8")

"""Tokenizers with added tokens against transformers 4, which opens the files that `extend_tokenizer` writes."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers

from erniekit.data.tokenizers.extend import extend_tokenizer
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from tests.data.added_token_texts import TEXTS, TOKENS
from tests.data.vocabularies import ERNIE, MASKS, NAMED, write_byte_pairs, write_sentencepiece
from tests.tiny_runs import ROOT

pytestmark = pytest.mark.parity


def _sentencepiece(folder: Path, **settings: object) -> Path:
    config = {"tokenizer_class": "LlamaTokenizer", **NAMED, **ERNIE, "additional_special_tokens": [*MASKS[4:]]}
    return write_sentencepiece(folder, config={**config, "add_bos_token": False, **settings}, add_dummy_prefix=True)


# the folder, and which of transformers' tokenizers read it as we do (see data/tokenizers/sentencepiece.py)
KINDS: dict[str, tuple[Callable[[Path], Path], tuple[bool, ...]]] = {
    "tokenizer.json": (lambda folder: ROOT / "examples/models/tiny-ernie", (True, False)),
    "SentencePiece": (_sentencepiece, (True, False)),
    "SentencePiece, not legacy": (lambda folder: _sentencepiece(folder, legacy=False), (False,)),
    "Qwen2": (lambda folder: write_byte_pairs(folder, "Qwen2Tokenizer"), (True, False)),
    "GPT-2": (lambda folder: write_byte_pairs(folder, "GPT2Tokenizer"), (True, False)),
}


NEEDS_PADDLENLP = pytest.mark.skipif(find_spec("paddlenlp") is None, reason="needs paddlenlp")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[NEEDS_PADDLENLP] if kind in ("Qwen2", "GPT-2") else []) for kind in KINDS]
)
def test_transformers_gives_the_same_ids(kind: str, tmp_path: Path) -> None:
    write, readers = KINDS[kind]
    extended = extend_tokenizer(write(tmp_path / "model"), TOKENS, tmp_path / "cache")
    ours = load_tokenizer(extended.folder)
    assert extended.count == len(TOKENS)
    for fast in readers:
        theirs = transformers.AutoTokenizer.from_pretrained(str(extended.folder), use_fast=fast)
        assert theirs.convert_tokens_to_ids(list(TOKENS)) == [ours.token_id(text) for text in TOKENS]
        assert len(theirs) == ours.vocab_size and not set(TOKENS) & set(theirs.all_special_tokens)
        assert [theirs.encode(text, add_special_tokens=False) for text in TEXTS] == ours.encode_batch(TEXTS)


@pytest.mark.parametrize("kind", ["tokenizer.json", "SentencePiece"])
def test_a_copy_that_transformers_saves_keeps_the_tokens(kind: str, tmp_path: Path) -> None:
    """With their ids, and as tokens that are read in texts."""
    extended = extend_tokenizer(KINDS[kind][0](tmp_path / "model"), TOKENS, tmp_path / "cache")
    theirs = transformers.AutoTokenizer.from_pretrained(str(extended.folder))
    theirs.save_pretrained(tmp_path / "saved")
    ours, again = load_tokenizer(extended.folder), load_tokenizer(tmp_path / "saved")
    assert again.text_tokens == ours.text_tokens == set(TOKENS)
    if kind == "tokenizer.json":
        assert again.encode_batch([again.plain_text(text) for text in TEXTS]) == ours.encode_batch(TEXTS)

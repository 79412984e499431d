"""Small vocabularies without tokenizer.json, trained on our own sentences: SentencePiece, and GPT-2's pair of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.data.conftest import SENTENCES

BEGIN, END = "<|begin_of_sentence|>", "<|end_of_sentence|>"
MASKS = tuple(f"<mask:{number}>" for number in range(8))
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
ERNIE = {"cls_token": BEGIN, "sep_token": END, "mask_token": "<mask:1>"}
TEXTS = (
    "", " ", "\n", "six apples", "Die Mühle 今天", "  spaces  and\nlines ", "emoji 🦆 x", "ﬁ ½", "<s>six</s>",
    f"{BEGIN}User: hi\nAssistant: ", f"six apples are left.{END}User: a\n", f"left. {END} next", "a <mask:7> b </s> c",
    "<mask:1><mask:2> x", "a<mask:4> b", f"{END}  x", "</s> c", "a </s>", "  <s>  ", "▁x", "x▁y", " <mask:1> ", "<unk>",
    "<s", "<mask:1", "tab\tand \u00a0 space", "12 + 30 = 42.",
)  # fmt: skip


def write_sentencepiece(folder: Path, *, config: dict[str, Any] | None = None, **training: Any) -> Path:
    """A byte-falling-back BPE model of 420 pieces, by default without dummy prefix, and its tokenizer_config.json."""
    import sentencepiece

    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "model_type": "bpe", "vocab_size": 420, "byte_fallback": True, "character_coverage": 1.0,
        "normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False,
        "control_symbols": [BEGIN, END], "user_defined_symbols": list(MASKS), "unk_id": 0, "bos_id": 1, "eos_id": 2,
        "pad_id": -1, "num_threads": 1, "minloglevel": 2, **training,
    }  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_prefix=str(folder / "tokenizer"), **settings
    )
    (folder / "tokenizer.vocab").unlink()
    values = {"tokenizer_class": "LlamaTokenizer", **NAMED, **ERNIE} if config is None else config
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def write_byte_pairs(folder: Path, tokenizer_class: str) -> Path:
    """vocab.json and merges.txt of a byte-level BPE of 400 tokens, with four added ones behind them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    backend.model.save(str(folder))
    first = backend.get_vocab_size()
    added = [("<|endoftext|>", True), ("<|im_start|>", True), ("<|im_end|>", True), ("<tool>", False)]
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    values = {
        "tokenizer_class": tokenizer_class, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>"],
        "added_tokens_decoder": {
            str(first + number): {"content": text, "special": special, **flags}
            for number, (text, special) in enumerate(added)
        },
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


BYTE_PAIR_TEXTS = [
    *(text.replace("<s>", "<|im_start|>").replace("</s>", "<|im_end|>") for text in TEXTS if "<unk>" not in text),
    "it's <|endoftext|> 123 4567",
    "a <|im_end|> \n b",
    "<tool> x <tool>y",
    "I'LL 1234 go\r\n\r\n  now",
]

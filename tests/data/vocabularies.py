"""Small vocabularies without tokenizer.json, trained on our own sentences: SentencePiece, GPT-2's pair, Tekken."""

from __future__ import annotations

import base64
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


# Voxtral's special tokens by their ids; the other places are reserved.
VOXTRAL_TOKENS = {
    0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 5: "[AVAILABLE_TOOLS]", 6: "[/AVAILABLE_TOOLS]",
    7: "[TOOL_RESULTS]", 8: "[/TOOL_RESULTS]", 9: "[TOOL_CALLS]", 10: "[IMG]", 11: "<pad>", 12: "[IMG_BREAK]",
    13: "[IMG_END]", 14: "[PREFIX]", 15: "[MIDDLE]", 16: "[SUFFIX]", 17: "[SYSTEM_PROMPT]", 18: "[/SYSTEM_PROMPT]",
    19: "[TOOL_CONTENT]", 24: "[AUDIO]", 25: "[BEGIN_AUDIO]", 32: "[ARGS]", 33: "[CALL_ID]", 34: "[TRANSCRIBE]",
}  # fmt: skip
TEKKEN_PATTERN = (  # of the published files
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
AUDIO_SECTION = {
    "sampling_rate": 16000, "frame_rate": 12.5, "chunk_length_s": 30.0,
    "audio_encoding_config": {"num_mel_bins": 128, "hop_length": 160, "window_size": 400},
}  # fmt: skip


def special_tokens_of_tekken(named: dict[int, str], number: int) -> list[dict[str, Any]]:
    texts = [named.get(place, f"<SPECIAL_{place}>") for place in range(number)]
    return [{"rank": place, "token_str": text, "is_control": True} for place, text in enumerate(texts)]


def tekken_values(version: str = "v7", tokens: dict[int, str] | None = None, special: int = 40) -> dict[str, Any]:
    """The contents of a tekken.json of 300 byte sequences; `tokens` None leaves out the list of special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's characters for the 256 bytes
    others = [number for number in range(256) if number not in printable]
    bytes_of = {chr(number): number for number in printable}
    bytes_of |= {chr(256 + place): number for place, number in enumerate(others)}
    words = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    merged = [bytes(bytes_of[character] for character in word) for word, _ in words if len(word) > 1]
    entries = [bytes([number]) for number in range(256)] + merged
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(entries)
    ]
    config = {
        "pattern": TEKKEN_PATTERN, "num_vocab_tokens": len(vocab), "default_vocab_size": special + 300,
        "default_num_special_tokens": special, "version": version,
    }  # fmt: skip
    listed = {} if tokens is None else {"special_tokens": special_tokens_of_tekken(tokens, special)}
    return {"config": config, "vocab": vocab, **listed}


def write_tekken(folder: Path, values: dict[str, Any] | None = None) -> Path:
    """A tekken.json, by default Voxtral's special tokens around a small vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    values = tekken_values(tokens=VOXTRAL_TOKENS) | {"audio": AUDIO_SECTION} if values is None else values
    (folder / "tekken.json").write_text(json.dumps(values), encoding="utf-8")
    return folder

"""Tokenizers with tokens of units: how they treat line ends differs, as in published models."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.data.conftest import SENTENCES

UNITS = 20
MARKS = ("<|continue|>", "<|correspond|>")
LINES = ["a.\n\n### User\nwhat? said.\n### Agent\nfine!\n\n### User\n"] * 40


def write_unit_tokenizer(folder: Path, kind: str, *, special: bool = False) -> Path:
    """Write a tokenizer with units and their marks.

    Args:
        kind: "mistral": a space before every text and a byte for a line end, as Mistral 7B has; "lines": every line end
            is a token of its own; "joined": line ends join full stops, as in Llama 3.
        special: whether the added tokens are control tokens, as those of the published model are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = [*SENTENCES, *LINES]
    if kind == "mistral":
        backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        data = [f"<0x{number:02X}>" for number in range(256)]
        texts = [text.replace("\n", " ") for text in texts]
        pieces = {"vocab_size": 700, "special_tokens": ["<unk>", "<s>", "</s>", *data]}
        backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        backend.train_from_iterator(texts, trainers.BpeTrainer(**pieces, show_progress=False))
        saved = json.loads(backend.to_str())
        saved["added_tokens"] = [token for token in saved["added_tokens"] if token["content"] not in data]
        saved["pre_tokenizer"] = None  # the vocabulary alone says where words end
        backend = Tokenizer.from_str(json.dumps(saved))
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        backend = Tokenizer(models.BPE(unk_token="<unk>"))
        lines = (
            pre_tokenizers.Split("\n", "isolated") if kind == "lines" else pre_tokenizers.Split(Regex(" "), "isolated")
        )
        backend.pre_tokenizer = pre_tokenizers.Sequence([lines, pre_tokenizers.ByteLevel(False, use_regex=False)])
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=["<unk>", "<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokens = [*MARKS, *(f"<|unit{number}|>" for number in range(UNITS))]
    (backend.add_special_tokens if special else backend.add_tokens)(
        [AddedToken(each, normalized=False) for each in tokens]
    )
    backend.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder

"""Make the shipped model folder: a small BPE tokenizer with ERNIE-4.5's special tokens, and a tiny configuration.

    python tools/quickstart/make_model.py [--data examples/data] [--output examples/models/tiny-ernie] [--check]

The folder holds no weights: `continue_training: false` starts from random ones. Digits are separate tokens, so that the
model can learn to calculate; any other text is covered through bytes. The same data gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from generated import write_or_check
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 512  # the merges that the data supports end before this; the model rounds up to it
SPECIAL_TOKENS = (
    "<unk>", "<s>", "</s>", "<|begin_of_sentence|>", "<|end_of_sentence|>", *(f"<mask:{index}>" for index in range(8)),
)  # fmt: skip
TEMPLATE_WORDS = "User: \nAssistant: "

MODEL = {
    "architectures": ["Ernie4_5ForCausalLM"],
    "model_type": "ernie4_5",
    "hidden_act": "silu",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "initializer_range": 0.06,
    "use_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def texts(data: Path) -> Iterator[str]:
    """The words of every shipped training file."""
    for line in (data / "sft-train.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        yield from (TEMPLATE_WORDS, record.get("system", ""), *record["src"], *record["tgt"])
    for line in (data / "text-train.jsonl").read_text(encoding="utf-8").splitlines():
        yield json.loads(line)["text"]


def train_tokenizer(data: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(data), trainer)
    return tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("examples/data"))
    parser.add_argument("--output", type=Path, default=Path("examples/models/tiny-ernie"))
    parser.add_argument("--check", action="store_true", help="only check that the files are up to date")
    arguments = parser.parse_args()
    tokenizer = train_tokenizer(arguments.data)
    ids = {name: tokenizer.token_to_id(token) for name, token in (("bos", "<s>"), ("eos", "</s>"), ("pad", "<unk>"))}
    config = {**MODEL, "vocab_size": VOCABULARY, **{f"{name}_token_id": index for name, index in ids.items()}}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<unk>",
        "unk_token": "<unk>",
        "cls_token": "<|begin_of_sentence|>",
        "sep_token": "<|end_of_sentence|>",
        "mask_token": "<mask:1>",
        "model_max_length": MODEL["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    files = {
        arguments.output / "tokenizer.json": tokenizer.to_str(pretty=True) + "\n",
        arguments.output / "config.json": json.dumps(config, indent=2, sort_keys=True) + "\n",
        arguments.output / "tokenizer_config.json": json.dumps(tokenizer_config, indent=2, sort_keys=True) + "\n",
    }
    return write_or_check(files, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())

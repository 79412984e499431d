"""Make the model folders of the examples that speak: a tiny one for the quickstart, and the shape of VALL-E.

    python tools/quickstart/make_speaker.py [--output examples/models] [--check]

tiny-speaker is a Qwen3 of 1.7 million parameters, in whose tokenizer each digit is one token; any other text is
covered through bytes. What makes it speak, tables and heads of codes, a run adds. vall-e is the shape of that trainer's
default, which speaks already, with a tokenizer of bytes. Neither holds weights: `continue_training: false` starts from
random ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from generated import write_or_check
from make_speech import DIGITS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 384  # the merges that the words support end before this; the model rounds up to it
BYTES = 256
END = "<|endoftext|>"
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "initializer_range": 0.06,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
VALL_E = {
    "architectures": ["VALLE"],
    "model_type": "vall_e",
    "audio_vocab_size": 1024,
    "num_audio_codebook": 8,
    "noncausal_masks": False,
    "unified_position_ids": False,
    "classifiers_bias": False,
    "torch_dtype": "float32",
}
VALL_E_LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_act": "gelu",
    "max_position_embeddings": 22750,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def tokenizer_of(words: Sequence[str], vocabulary: int) -> Tokenizer:
    """Merge the bytes of some words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*words, *words], trainer)  # a merge wants a pair that occurs twice
    return tokenizer


def files(folder: Path, config: dict, tokenizer: Tokenizer) -> dict[Path, str]:
    """Return the text of each file of a model folder."""
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
    }
    values = {"config": config, "tokenizer_config": tokenizer_config}
    found = {
        folder / f"{name}.json": json.dumps(each, indent=2, sort_keys=True) + "\n" for name, each in values.items()
    }
    return found | {folder / "tokenizer.json": tokenizer.to_str(pretty=True) + "\n"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("examples/models"))
    parser.add_argument("--check", action="store_true", help="only check that the files are up to date")
    arguments = parser.parse_args()
    words = tokenizer_of([*DIGITS, *(f" {digit}" for digit in DIGITS)], VOCABULARY)
    end = {name: words.token_to_id(END) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    tiny = files(arguments.output / "tiny-speaker", {**TINY, **end, "vocab_size": VOCABULARY}, words)
    characters = tokenizer_of([], BYTES + 1)
    llama = {**VALL_E_LLAMA, "vocab_size": characters.get_vocab_size()}
    vall_e = files(arguments.output / "vall-e", {**VALL_E, **end, "llm_config": llama}, characters)
    return write_or_check({**tiny, **vall_e}, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())

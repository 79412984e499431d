"""Record tests/model/family_*.npz: tiny transformers models of each family with their logits and gradients.

    python -m tests.parity.record_families [FAMILY ...]

The plain test run checks our decoder against these files, so that it needs neither torch nor transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from .families import LLAMA3_SCALING, YARN, random_model, record

TARGET = Path(__file__).parents[1] / "model"
TINY = {"vocab_size": 13, "hidden_size": 8, "intermediate_size": 6, "num_attention_heads": 2, "num_key_value_heads": 1}
SHAPES = {
    "llama": {"attention_bias": True, "mlp_bias": True, "rope_scaling": LLAMA3_SCALING},
    "mistral": {"sliding_window": 16},
    "qwen2": {**YARN, "tie_word_embeddings": True},
    "qwen3": {"head_dim": 6},
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "mlp_only_layers": [0]},
}
TOKENS = 80  # more than the original length of the scalings


def main(families: list[str]) -> None:
    for family in families or SHAPES:
        shape = SHAPES[family]
        model = random_model(family, seed=21, **TINY, **shape)
        rng = np.random.default_rng(22)
        ids = rng.integers(0, TINY["vocab_size"], TOKENS)
        labels = np.where(rng.random(TOKENS) < 0.3, -100, rng.integers(0, TINY["vocab_size"], TOKENS))
        record(model, TARGET / f"family_{family}.npz", ids, labels)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Record tests/model/decoder_vector.npz: a tiny transformers model with its logits and gradients.

    python -m tests.parity.record_decoder

The plain test run checks our decoder against this file, so that it needs neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .families import random_model, record

TARGET = Path(__file__).parents[1] / "model" / "decoder_vector.npz"
SHAPE = {"vocab_size": 29, "hidden_size": 12, "intermediate_size": 20, "head_dim": 6, "use_bias": True}


def main() -> None:
    model = random_model("ernie4_5", seed=11, pad_token_id=0, **SHAPE)
    rng = np.random.default_rng(12)
    ids = rng.integers(1, SHAPE["vocab_size"], 60)
    labels = np.where(rng.random(60) < 0.3, -100, rng.integers(0, SHAPE["vocab_size"], 60))
    record(model, TARGET, ids, labels)


if __name__ == "__main__":
    main()

"""Record tests/model/family_*.npz: tiny transformers models of each family with their logits and gradients.

    python -m tests.parity.record_families

The plain test run checks our decoder against these files, so that it needs neither torch nor transformers.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import transformers

from .families import LLAMA3_SCALING, YARN_SCALING, random_model

TARGET = Path(__file__).parents[1] / "model"
TINY = {"vocab_size": 13, "hidden_size": 8, "intermediate_size": 6, "num_attention_heads": 2, "num_key_value_heads": 1}
SHAPES = {
    "llama": {"attention_bias": True, "mlp_bias": True, "rope_scaling": LLAMA3_SCALING},
    "qwen2": {"rope_scaling": YARN_SCALING, "tie_word_embeddings": True},
    "qwen3": {"head_dim": 6},
}
TOKENS = 80  # more than the original length of the scalings


def main() -> None:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    for family, shape in SHAPES.items():
        model = random_model(family, seed=21, **TINY, **shape)
        rng = np.random.default_rng(22)
        ids = rng.integers(0, TINY["vocab_size"], TOKENS)
        labels = np.where(rng.random(TOKENS) < 0.3, -100, rng.integers(0, TINY["vocab_size"], TOKENS))
        logits = model(input_ids=torch.tensor(ids[None])).logits
        loss = torch.nn.functional.cross_entropy(logits[0], torch.tensor(labels), reduction="sum")
        loss.backward()
        path = TARGET / f"family_{family}.npz"
        np.savez_compressed(
            path,
            config=np.frombuffer(json.dumps(model.config.to_dict()).encode(), np.uint8),
            versions=np.frombuffer(json.dumps(versions).encode(), np.uint8),
            ids=ids,
            labels=labels,
            logits=logits[0].detach().numpy(),
            loss=np.float32(loss.item()),
            **{f"weight/{name}": parameter.detach().numpy() for name, parameter in model.named_parameters()},
            **{f"gradient/{name}": parameter.grad.numpy() for name, parameter in model.named_parameters()},
        )
        print(f"{path}: {path.stat().st_size:,} bytes, {versions}")


if __name__ == "__main__":
    main()

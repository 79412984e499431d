"""Record tests/model/decoder_vector.npz: a tiny transformers model with its logits and gradients.

    python -m tests.parity.record_decoder

The plain test run checks our decoder against this file, so that it needs neither torch nor transformers.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import transformers

from .test_decoder import random_model

TARGET = Path(__file__).parents[1] / "model" / "decoder_vector.npz"
SHAPE = {"vocab_size": 29, "hidden_size": 12, "intermediate_size": 20, "head_dim": 6, "use_bias": True}


def main() -> None:
    model = random_model(seed=11, **SHAPE)
    rng = np.random.default_rng(12)
    ids = rng.integers(1, SHAPE["vocab_size"], 60)
    labels = np.where(rng.random(60) < 0.3, -100, rng.integers(0, SHAPE["vocab_size"], 60))
    logits = model(input_ids=torch.tensor(ids[None])).logits
    loss = torch.nn.functional.cross_entropy(logits[0], torch.tensor(labels), reduction="sum")
    loss.backward()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    np.savez_compressed(
        TARGET,
        config=np.frombuffer(json.dumps(model.config.to_dict()).encode(), np.uint8),
        versions=np.frombuffer(json.dumps(versions).encode(), np.uint8),
        ids=ids,
        labels=labels,
        logits=logits[0].detach().numpy(),
        loss=np.float32(loss.item()),
        **{f"weight/{name}": parameter.detach().numpy() for name, parameter in model.named_parameters()},
        **{f"gradient/{name}": parameter.grad.numpy() for name, parameter in model.named_parameters()},
    )
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes, {versions}")


if __name__ == "__main__":
    main()

"""Record tests/model/lora/peft_*.npz: adapters that peft wrote beside tiny transformers models, with the logits and
gradients of the two together.

    python -m tests.parity.record_peft

The plain test run checks our adapters against these files, so that it needs neither torch nor peft.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from safetensors.numpy import load_file

from .families import random_model

TARGET = Path(__file__).parents[1] / "model" / "lora"
TINY = {"vocab_size": 13, "hidden_size": 8, "intermediate_size": 6, "num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {"moe_num_experts": 3, "moe_k": 2, "moe_intermediate_size": 4, "moe_layer_start_index": 1}
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "lora_experts": (
        "ernie4_5_moe",
        EXPERTS,
        {"target_modules": EVERY, "rank_pattern": {r"experts\.1\..*": 1}, "alpha_pattern": {"q_proj": 3}},
    ),
    "rslora_dora": ("qwen2", {}, {"target_modules": EVERY, "use_dora": True, "use_rslora": True}),
}
TOKENS = 24


def main() -> None:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
    for name, (family, shape, options) in CASES.items():
        base = random_model(family, seed=31, **TINY, **shape)
        weights = {f"weight/{key}": value.detach().numpy().copy() for key, value in base.named_parameters()}
        config = json.dumps(base.config.to_dict()).encode()
        model = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=5, task_type="CAUSAL_LM", **options)).eval()
        torch.manual_seed(32)
        trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
        with torch.no_grad():
            for value in trained.values():
                value.add_(torch.randn(value.shape) * 0.2)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            adapter_config = (Path(folder) / "adapter_config.json").read_bytes()
            adapters = load_file(Path(folder) / "adapter_model.safetensors")
        rng = np.random.default_rng(33)
        ids, labels = (rng.integers(0, TINY["vocab_size"], TOKENS) for _ in range(2))
        logits = model(input_ids=torch.tensor(ids[None])).logits[0]
        torch.nn.functional.cross_entropy(logits, torch.tensor(labels), reduction="sum").backward()
        path = TARGET / f"peft_{name}.npz"
        np.savez_compressed(
            path,
            versions=np.frombuffer(json.dumps(versions).encode(), np.uint8),
            config=np.frombuffer(config, np.uint8),
            adapter_config=np.frombuffer(adapter_config, np.uint8),
            ids=ids,
            labels=labels,
            logits=logits.detach().numpy(),
            **weights,
            **{f"adapter/{key}": value for key, value in adapters.items()},
            **{f"gradient/{key.replace('.default', '')}": value.grad.numpy() for key, value in trained.items()},
        )
        print(f"{path}: {path.stat().st_size:,} bytes, {versions}")


if __name__ == "__main__":
    main()

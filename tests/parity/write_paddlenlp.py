"""Write paddlenlp's random Llama and Qwen2 folders with their logits; run in a process of its own.

    python -m tests.parity.write_paddlenlp FOLDER

Each folder of FOLDER is what `save_pretrained(safe_serialization=True)` writes, plus logits.npz (ids, logits);
FOLDER/pickled is one without safe_serialization.
"""

from __future__ import annotations

import sys
from pathlib import Path

from erniekit.environment import apply_cpu_settings

apply_cpu_settings()

import numpy as np  # noqa: E402
import paddle  # noqa: E402
from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM  # noqa: E402

BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "use_flash_attention": False,
}
FUSED = {"fuse_attention_qkv": True, "fuse_attention_ffn": True}
CASES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True, "rope_theta": 500000.0}),
    "llama-square": (LlamaConfig, LlamaForCausalLM, {"intermediate_size": 32, "num_key_value_heads": 4}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"rms_norm_eps": 1e-5}),
    "qwen2-tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2-fused": (Qwen2Config, Qwen2ForCausalLM, FUSED),
    "qwen2-fused, all key heads": (Qwen2Config, Qwen2ForCausalLM, {**FUSED, "num_key_value_heads": 4}),
}


def main(target: Path) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(3, BASE["vocab_size"], (1, 40))
    for name, (config_class, model_class, changes) in CASES.items():
        model = model_class(config_class(**{**BASE, **changes}))
        model.eval()
        for parameter_name, parameter in model.named_parameters():
            offset = 1.0 if "norm" in parameter_name else 0.0
            parameter.set_value(rng.standard_normal(parameter.shape).astype(np.float32) * 0.25 + offset)
        # Small shards for one of them, so that an index is read, too.
        limits = {"max_shard_size": "20KB"} if name == "llama" else {}
        model.save_pretrained(str(target / name), safe_serialization=True, **limits)
        with paddle.no_grad():
            output = model(paddle.to_tensor(ids))
        logits = output[0] if isinstance(output, (tuple, list)) else output
        np.savez(target / name / "logits.npz", ids=ids, logits=logits.numpy())
        if name == "llama-tied":
            model.save_pretrained(str(target / "pickled"))
            np.savez(target / "pickled" / "logits.npz", ids=ids, logits=logits.numpy())


if __name__ == "__main__":
    main(Path(sys.argv[1]))

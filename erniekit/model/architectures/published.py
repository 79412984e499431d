"""The shapes of published models, so that a layout can be planned before a model is fetched.

Of ERNIE-4.5 what Baidu's model cards and recipes state, of Qwen3-0.6B and of OmniVoice, which is built on it, what
their files say. A model's own `config.json` takes precedence as soon as it is here.
Needs neither Paddle nor NumPy.
"""

from __future__ import annotations

import re
from typing import Any

from erniekit.model.architectures.model_config import ModelConfig

_SIZES: dict[str, dict[str, Any]] = {
    "0.3B": {
        "model_type": "ernie4_5",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    "21B-A3B": {
        "model_type": "ernie4_5_moe",
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    "300B-A47B": {
        "model_type": "ernie4_5_moe",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 54,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "moe_num_experts": 64,
        "moe_k": 8,
        "moe_intermediate_size": 3584,
        "moe_num_shared_experts": 0,
        "moe_layer_start_index": 3,
    },
}
_COMMON = {"vocab_size": 103424, "max_position_embeddings": 131072}
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
_OTHERS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": _QWEN3,
    "k2-fsa/OmniVoice": {
        "model_type": "omnivoice",
        "audio_vocab_size": 1025,
        "audio_mask_id": 1024,
        "num_audio_codebook": 8,
        "llm_config": _QWEN3 | {"vocab_size": 151676},  # a row for each token, seven of them new
    },
}
_NAME = re.compile(r"(baidu|PaddlePaddle)/ERNIE-4\.5-(?P<size>[\w.-]+?)(-Base)?(-PT|-Paddle)?(@.*)?")


def published_model(name: str) -> ModelConfig | None:
    """The shape of the model that a hub knows by this name, or None where it is none of them."""
    plain = name.partition("@")[0]
    if plain in _OTHERS:
        return ModelConfig.from_json(_OTHERS[plain], where=name)
    match = _NAME.fullmatch(name)
    size = match["size"] if match else ""
    if size not in _SIZES:
        return None
    return ModelConfig.from_json(_COMMON | _SIZES[size], where=name)

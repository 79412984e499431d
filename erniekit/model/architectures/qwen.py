"""Qwen2 and Qwen3, dense. Defaults are those of the configuration classes of transformers 4.55."""

from __future__ import annotations

from typing import Any

from erniekit.model.architectures.architecture import (
    ALWAYS,
    ATTENTION_LINEARS,
    NEUTRAL_FOR_PADDLENLP,
    Architecture,
    PaddleFiles,
)
from erniekit.model.architectures.plain_decoder import DENSE_LAYER, QK_NORM, decoder_rules

DEFAULTS = {
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_sliding_window": (False,),
    "layer_types": ("full_attention",),  # of a list, every entry
}
WINDOW_KEYS = ("sliding_window", "max_window_layers")  # these act where use_sliding_window is true

QWEN2 = Architecture(
    "qwen2",
    "Qwen2ForCausalLM",
    defaults=DEFAULTS,
    neutral={**NEUTRAL, **NEUTRAL_FOR_PADDLENLP},
    inert_keys=WINDOW_KEYS,
    biases=dict.fromkeys(("q_proj", "k_proj", "v_proj"), ALWAYS),
    paddle_files=PaddleFiles("paddlenlp", "qwen2."),
)

QWEN3 = Architecture(
    "qwen3",
    "Qwen3ForCausalLM",
    own_fields=("attention_bias",),
    defaults=DEFAULTS,
    head_dim=128,
    neutral=NEUTRAL,
    inert_keys=WINDOW_KEYS,
    rules=decoder_rules({**DENSE_LAYER, **QK_NORM}),
    biases=dict.fromkeys(ATTENTION_LINEARS, "attention_bias"),
    qk_norm="head",
)

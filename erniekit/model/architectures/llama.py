"""Llama 2 and 3, and what shares their architecture. Defaults are those of transformers 4.55's configuration class."""

from __future__ import annotations

from erniekit.model.architectures.architecture import (
    ATTENTION_LINEARS,
    MLP_LINEARS,
    NEUTRAL_FOR_PADDLENLP,
    Architecture,
    PaddleFiles,
)

LLAMA = Architecture(
    "llama",
    "LlamaForCausalLM",
    own_fields=("attention_bias", "mlp_bias"),
    defaults={
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    neutral={**NEUTRAL_FOR_PADDLENLP, "rope_interleaved": (False,)},
    biases={**dict.fromkeys(ATTENTION_LINEARS, "attention_bias"), **dict.fromkeys(MLP_LINEARS, "mlp_bias")},
    paddle_files=PaddleFiles("paddlenlp", "llama."),
)

"""GLM-4-0414: a part of each head is turned, four norms a layer, and gate and up are one linear layer.

Defaults are those of transformers 4.55's configuration class.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from erniekit.model.architectures.architecture import Architecture, Key
from erniekit.model.architectures.plain_decoder import (
    ATTENTION,
    ATTENTION_OUTPUT_NORM,
    FUSED_MLP,
    MLP_OUTPUT_NORM,
    POST_NORMS,
    PRE_NORMS,
    decoder_rules,
)
from erniekit.model.architectures.rope_scaling import Frequencies, rotary_frequencies
from erniekit.model.architectures.sharding import NORM

if TYPE_CHECKING:
    from erniekit.model.architectures.model_config import ModelConfig

NAMES = {ATTENTION_OUTPUT_NORM: "post_self_attn_layernorm", MLP_OUTPUT_NORM: "post_mlp_layernorm"}
NORMS = (*PRE_NORMS, *POST_NORMS)


def rope_tables(config: ModelConfig) -> tuple[Frequencies]:
    """Return the table that turns the first `partial_rotary_factor` of each head and leaves the rest."""
    turned = _turned_channels(config)
    table = rotary_frequencies(replace(config, head_dim=turned))
    return (table._replace(per_pair=table.per_pair + (0.0,) * ((config.head_dim - turned) // 2)),)


def problems(config: ModelConfig) -> list[str]:
    """Return a line for a part of a head that is no number of pairs."""
    turned, factor = _turned_channels(config), config.own["partial_rotary_factor"]
    if 0 < turned <= config.head_dim and turned % 2 == 0:
        return []
    return [f"partial_rotary_factor: {factor} of head_dim {config.head_dim} is no part of pairs"]


def _turned_channels(config: ModelConfig) -> int:
    return int(config.head_dim * config.own["partial_rotary_factor"])


GLM4 = Architecture(
    "glm4",
    "Glm4ForCausalLM",
    own_fields=("attention_bias",),
    own_keys={"partial_rotary_factor": Key(float, 0, default=0.5)},
    defaults={
        "max_position_embeddings": 131072,
        "rope_theta": 10000.0,
        "rms_norm_eps": 0.00000015625,
        "tie_word_embeddings": False,
        "num_key_value_heads": 2,
        "attention_bias": True,
    },
    head_dim=128,
    problems=problems,
    names=NAMES,
    rules=decoder_rules({**ATTENTION, **FUSED_MLP, **dict.fromkeys(NORMS, NORM)}, NAMES),
    biases=dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attention_bias"),
    norms=NORMS,
    rotary_interleaved=True,
    rope_tables=rope_tables,
    fused_gate_up=True,
)

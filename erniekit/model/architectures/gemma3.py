"""Gemma 3, text: layers with and without a window have rope tables of their own, and norms multiply by 1 + w.

Defaults are those of transformers 4.55's configuration class.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from erniekit.model.architectures.architecture import ATTENTION_LINEARS, Architecture, Key
from erniekit.model.architectures.layer_types import (
    FULL,
    LAYER_TYPES,
    SLIDING,
    SLIDING_WINDOW,
    acting_window,
    is_sliding,
    layer_type_problems,
)
from erniekit.model.architectures.plain_decoder import (
    ATTENTION,
    ATTENTION_OUTPUT_NORM,
    MLP,
    MLP_INPUT_NORM,
    MLP_OUTPUT_NORM,
    POST_NORMS,
    PRE_NORMS,
    QK_NORM,
    LayerAttention,
    Multipliers,
    decoder_rules,
)
from erniekit.model.architectures.rope_parameters import RopeKeys
from erniekit.model.architectures.rope_scaling import Frequencies, rotary_frequencies
from erniekit.model.architectures.sharding import NORM

if TYPE_CHECKING:
    from erniekit.model.architectures.model_config import ModelConfig

NAMES = {
    ATTENTION_OUTPUT_NORM: "post_attention_layernorm",
    MLP_INPUT_NORM: "pre_feedforward_layernorm",
    MLP_OUTPUT_NORM: "post_feedforward_layernorm",
}
NORMS = (*PRE_NORMS, *POST_NORMS)
OFFSET_NORM = replace(NORM, initial=0.0)
LAYER = {
    **ATTENTION,
    **{path: replace(rule, initial=0.0) for path, rule in QK_NORM.items()},
    **MLP,
    **dict.fromkeys(NORMS, OFFSET_NORM),
}


def rope_tables(config: ModelConfig) -> tuple[Frequencies, ...]:
    """Return the table of layers without a window, then that of the others, which is never scaled."""
    local = replace(config, rope_theta=config.own["rope_local_base_freq"], rope_scaling=None)
    return rotary_frequencies(config), rotary_frequencies(local)


def layer_attention(config: ModelConfig, layer: int) -> LayerAttention:
    """Return the window and the table of a layer by its type."""
    if is_sliding(config, layer, config.own["sliding_window_pattern"]):
        return LayerAttention(acting_window(config), rope=1)
    return LayerAttention()


GEMMA3_TEXT = Architecture(
    "gemma3_text",
    "Gemma3ForCausalLM",
    own_fields=("attention_bias",),
    own_keys={
        "layer_types": LAYER_TYPES,
        "sliding_window": SLIDING_WINDOW,
        "sliding_window_pattern": Key(int, 1, default=6),
        "query_pre_attn_scalar": Key(int, 1, default=256),
        "rope_local_base_freq": Key(float, 1.001, default=10000.0),
    },
    aliases={"_sliding_window_pattern": "sliding_window_pattern"},
    defaults={
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
    },
    head_dim=256,
    neutral={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False,),
    },
    inert_keys=("cache_implementation",),
    rope_sets={FULL: RopeKeys(), SLIDING: RopeKeys("rope_local_base_freq", None)},
    saved_keys={"hidden_activation": "gelu_pytorch_tanh"},
    problems=layer_type_problems,
    names=NAMES,
    rules=decoder_rules(LAYER, NAMES, OFFSET_NORM),
    biases=dict.fromkeys(ATTENTION_LINEARS, "attention_bias"),
    norms=NORMS,
    norm_offset=1.0,
    qk_norm="head",
    multipliers=lambda config: Multipliers(
        embedding=config.hidden_size**0.5, attention=config.own["query_pre_attn_scalar"] ** -0.5
    ),
    activation="geglu_tanh",
    rope_tables=rope_tables,
    layer_attention=layer_attention,
)

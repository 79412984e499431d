"""GPT-OSS: attention sinks, every other layer with a window, and experts with biases whose weights files stack.

Defaults are those of transformers 4.55's configuration class, but an absent `rope_scaling` means none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from erniekit.model.architectures.architecture import ALWAYS, ATTENTION_LINEARS, MLP_LINEARS, Architecture
from erniekit.model.architectures.layer_types import (
    LAYER_TYPES,
    SLIDING_WINDOW,
    acting_window,
    is_sliding,
    layer_type_problems,
)
from erniekit.model.architectures.plain_decoder import (
    DENSE_LAYER,
    EXPERTS,
    MLP,
    SINKS,
    LayerAttention,
    Routing,
    attention_shapes,
    decoder_rules,
    without,
)

if TYPE_CHECKING:
    from erniekit.model.architectures.model_config import ModelConfig

NAMES = {"gate": "router"}


def layer_attention(config: ModelConfig, layer: int) -> LayerAttention:
    """Return the window of a layer of the sliding type."""
    return LayerAttention(acting_window(config) if is_sliding(config, layer, 2) else None)


GPT_OSS = Architecture(
    "gpt_oss",
    "GptOssForCausalLM",
    own_fields=("moe_num_experts", "moe_k", "moe_intermediate_size"),
    key_names={
        "moe_num_experts": "num_local_experts",
        "moe_k": "num_experts_per_tok",
        "moe_intermediate_size": "intermediate_size",
    },
    own_keys={"layer_types": LAYER_TYPES, "sliding_window": SLIDING_WINDOW._replace(default=128)},
    defaults={
        "max_position_embeddings": 131072,
        "rope_theta": 150000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "num_key_value_heads": 8,
        "moe_num_experts": 128,
        "moe_k": 4,
    },
    head_dim=64,
    neutral={"attention_bias": (True,), "swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
    inert_keys=("initial_context_length", "experts_per_token"),
    problems=layer_type_problems,
    names=NAMES,
    rules=decoder_rules({**without(DENSE_LAYER, MLP), **EXPERTS, **SINKS}, NAMES),
    stacked_experts={
        "gate_up_proj": ("gate_proj.weight", "up_proj.weight"),
        "gate_up_proj_bias": ("gate_proj.bias", "up_proj.bias"),
        "down_proj": ("down_proj.weight",),
        "down_proj_bias": ("down_proj.bias",),
    },
    attention_shapes=lambda config: {"sinks": (config.num_attention_heads,)} | attention_shapes(config),
    attention_sinks=True,
    biases=dict.fromkeys((*ATTENTION_LINEARS, *MLP_LINEARS), ALWAYS),
    activation="clamped_swiglu",
    layer_attention=layer_attention,
    routing=lambda config: Routing(bias=True),
)

"""Mixtures of experts of Qwen2, with a gated shared expert, and of Qwen3, without one: softmax routers without a bias.

Attention is that of the dense models. Keys have names of their own: `num_experts`, `num_experts_per_tok` and
`decoder_sparse_step` are the decoder's `moe_num_experts`, `moe_k` and `moe_layer_interval`. Defaults are those of
transformers 4.55's configuration classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from erniekit.model.architectures import qwen
from erniekit.model.architectures.architecture import ATTENTION_LINEARS, Architecture, Key
from erniekit.model.architectures.plain_decoder import (
    DENSE_LAYER,
    EXPERTS,
    QK_NORM,
    SHARED_EXPERT_GATE,
    SHARED_EXPERTS,
    Routing,
    decoder_rules,
)
from erniekit.model.architectures.plain_decoder import has_experts as is_at_interval

if TYPE_CHECKING:
    from erniekit.model.architectures.model_config import ModelConfig


def has_experts(config: ModelConfig, layer: int) -> bool:
    """Return whether a layer has experts: every `decoder_sparse_step`-th one, unless `mlp_only_layers` names it."""
    return is_at_interval(config, layer) and layer not in config.own["mlp_only_layers"]


def routing(config: ModelConfig) -> Routing:
    """Return a softmax router that divides the weights of a token's experts by their sum where the key says so."""
    return Routing(normalizes=config.own["norm_topk_prob"])


def problems(config: ModelConfig) -> list[str]:
    """Return a line for layers in `mlp_only_layers` that are no numbers."""
    layers = config.own["mlp_only_layers"]
    if all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
        return []
    return [f"mlp_only_layers: expected numbers of layers, got {layers!r}"]


FIELDS = ("moe_num_experts", "moe_k", "moe_intermediate_size", "moe_layer_interval")
KEY_NAMES = {
    "moe_num_experts": "num_experts",
    "moe_k": "num_experts_per_tok",
    "moe_layer_interval": "decoder_sparse_step",
}
OWN_KEYS = {"norm_topk_prob": Key(bool, default=False), "mlp_only_layers": Key(list, default=[])}
NAMES = {"shared_experts": "shared_expert"}

QWEN2_MOE = Architecture(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    own_fields=("attention_bias", *FIELDS),
    key_names={**KEY_NAMES, "attention_bias": "qkv_bias"},
    own_keys={**OWN_KEYS, "shared_expert_intermediate_size": Key(int, 1, default=5632)},
    small_values={"shared_expert_intermediate_size": 128},
    defaults={
        **qwen.DEFAULTS,
        "num_key_value_heads": 16,
        "attention_bias": True,
        "moe_num_experts": 60,
        "moe_k": 4,
        "moe_intermediate_size": 1408,
    },
    neutral=qwen.NEUTRAL,
    inert_keys=qwen.WINDOW_KEYS,
    problems=problems,
    names=NAMES,
    rules=decoder_rules({**DENSE_LAYER, **EXPERTS, **SHARED_EXPERTS, **SHARED_EXPERT_GATE}, NAMES),
    biases=dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attention_bias"),
    has_experts=has_experts,
    routing=routing,
    shared_experts_size=lambda config: config.own["shared_expert_intermediate_size"],
    shared_expert_gate=True,
)

QWEN3_MOE = Architecture(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    own_fields=("attention_bias", *FIELDS),
    key_names=KEY_NAMES,
    own_keys=OWN_KEYS,
    defaults={
        **qwen.DEFAULTS,
        "num_key_value_heads": 4,
        "moe_num_experts": 128,
        "moe_k": 8,
        "moe_intermediate_size": 768,
    },
    aliases={"num_local_experts": "num_experts"},  # of transformers 5
    neutral=qwen.NEUTRAL,
    inert_keys=qwen.WINDOW_KEYS,
    problems=problems,
    rules=decoder_rules({**DENSE_LAYER, **QK_NORM, **EXPERTS}),
    biases=dict.fromkeys(ATTENTION_LINEARS, "attention_bias"),
    qk_norm="head",
    has_experts=has_experts,
    routing=routing,
)

"""Qwen3 mixtures of experts: Qwen3's attention, a softmax router without a bias, and no shared experts.

Keys have names of their own. `num_experts` and `num_experts_per_tok` are the decoder's `moe_num_experts` and `moe_k`;
`decoder_sparse_step` is its `moe_layer_interval`. Defaults are those of transformers 4.55's configuration class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from erniekit.model.architectures import qwen
from erniekit.model.architectures.architecture import ATTENTION_LINEARS, Architecture, Key
from erniekit.model.architectures.plain_decoder import DENSE_LAYER, EXPERTS, QK_NORM, decoder_rules
from erniekit.model.architectures.plain_decoder import has_experts as is_at_interval

if TYPE_CHECKING:
    from erniekit.model.architectures.model_config import ModelConfig


def has_experts(config: ModelConfig, layer: int) -> bool:
    """Return whether a layer has experts: every `decoder_sparse_step`-th one, unless `mlp_only_layers` names it."""
    return is_at_interval(config, layer) and layer not in config.own["mlp_only_layers"]


def problems(config: ModelConfig) -> list[str]:
    """Return a line for layers in `mlp_only_layers` that are no numbers."""
    layers = config.own["mlp_only_layers"]
    if all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
        return []
    return [f"mlp_only_layers: expected numbers of layers, got {layers!r}"]


QWEN3_MOE = Architecture(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    own_fields=("attention_bias", "moe_num_experts", "moe_k", "moe_intermediate_size", "moe_layer_interval"),
    key_names={
        "moe_num_experts": "num_experts",
        "moe_k": "num_experts_per_tok",
        "moe_layer_interval": "decoder_sparse_step",
    },
    own_keys={"norm_topk_prob": Key(bool, default=False), "mlp_only_layers": Key(list, default=[])},
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
    qk_norm=True,
    has_experts=has_experts,
    normalizes_routes=lambda config: bool(config.own["norm_topk_prob"]),
)

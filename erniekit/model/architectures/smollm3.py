"""SmolLM3: Llama in which some layers turn neither queries nor keys (NoPE).

Defaults are those of transformers 4.55's configuration class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from erniekit.model.architectures.architecture import ATTENTION_LINEARS, MLP_LINEARS, Architecture, Key
from erniekit.model.architectures.plain_decoder import LayerAttention
from erniekit.model.architectures.qwen import NEUTRAL, WINDOW_KEYS

if TYPE_CHECKING:
    from erniekit.model.architectures.model_config import ModelConfig


def layer_attention(config: ModelConfig, layer: int) -> LayerAttention:
    """Return whether a layer turns its queries: where `no_rope_layers` has a 1, or but each `interval`-th one."""
    turned = config.own["no_rope_layers"]
    interval = config.own["no_rope_layer_interval"]
    return LayerAttention(rope=0 if (turned[layer] if turned else (layer + 1) % interval) else None)


def problems(config: ModelConfig) -> list[str]:
    """Return a line for a list that does not say of every layer whether it has rotary embeddings."""
    turned = config.own["no_rope_layers"]
    if not turned or (len(turned) == config.num_hidden_layers and all(value in (0, 1) for value in turned)):
        return []
    return [f"no_rope_layers: expected a 0 or 1 for each of {config.num_hidden_layers} layers, got {turned!r}"]


SMOLLM3 = Architecture(
    "smollm3",
    "SmolLM3ForCausalLM",
    own_fields=("attention_bias", "mlp_bias"),
    own_keys={"no_rope_layers": Key(list, nullable=True), "no_rope_layer_interval": Key(int, 1, default=4)},
    defaults={
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
    },
    neutral=NEUTRAL,
    inert_keys=WINDOW_KEYS,
    problems=problems,
    biases={**dict.fromkeys(ATTENTION_LINEARS, "attention_bias"), **dict.fromkeys(MLP_LINEARS, "mlp_bias")},
    layer_attention=layer_attention,
)

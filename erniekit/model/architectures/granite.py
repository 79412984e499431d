"""Granite 3: Llama with constants that multiply embeddings, branches, attention scores and logits.

Defaults are those of transformers 4.55's configuration class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from erniekit.model.architectures.architecture import ATTENTION_LINEARS, MLP_LINEARS, Architecture, Key
from erniekit.model.architectures.plain_decoder import Multipliers

if TYPE_CHECKING:
    from erniekit.model.architectures.model_config import ModelConfig


def multipliers(config: ModelConfig) -> Multipliers:
    """Return the constants of a configuration; its logits are divided."""
    own = config.own
    return Multipliers(
        own["embedding_multiplier"],
        own["residual_multiplier"],
        own["attention_multiplier"],
        1.0 / own["logits_scaling"],
    )


GRANITE = Architecture(
    "granite",
    "GraniteForCausalLM",
    own_fields=("attention_bias", "mlp_bias"),
    own_keys=dict.fromkeys(
        ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
        Key(float, 1e-6, default=1.0),
    ),
    defaults={
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    biases={**dict.fromkeys(ATTENTION_LINEARS, "attention_bias"), **dict.fromkeys(MLP_LINEARS, "mlp_bias")},
    multipliers=multipliers,
)

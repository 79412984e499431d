"""Mistral: Llama whose layers all attend to a window, where `sliding_window` is shorter than the model's positions.

Defaults are those of transformers 4.55's configuration class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from erniekit.model.architectures.architecture import Architecture
from erniekit.model.architectures.layer_types import SLIDING_WINDOW, acting_window
from erniekit.model.architectures.plain_decoder import LayerAttention

if TYPE_CHECKING:
    from erniekit.model.architectures.model_config import ModelConfig


def layer_attention(config: ModelConfig, layer: int) -> LayerAttention:
    """Return the window of every layer."""
    return LayerAttention(acting_window(config))


MISTRAL = Architecture(
    "mistral",
    "MistralForCausalLM",
    own_keys={"sliding_window": SLIDING_WINDOW},
    defaults={
        "max_position_embeddings": 131072,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "num_key_value_heads": 8,
    },
    layer_attention=layer_attention,
)

"""Mixtral: Mistral's attention, and experts in every layer, whose names in files are of their own.

Defaults are those of transformers 4.55's configuration class.
"""

from __future__ import annotations

from erniekit.model.architectures.architecture import Architecture
from erniekit.model.architectures.layer_types import SLIDING_WINDOW
from erniekit.model.architectures.mistral import layer_attention
from erniekit.model.architectures.plain_decoder import DENSE_LAYER, EXPERTS, MLP, decoder_rules, without

NAMES = {"mlp": "block_sparse_moe", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}

MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    own_fields=("moe_num_experts", "moe_k", "moe_intermediate_size"),
    key_names={
        "moe_num_experts": "num_local_experts",
        "moe_k": "num_experts_per_tok",
        "moe_intermediate_size": "intermediate_size",
    },
    own_keys={"sliding_window": SLIDING_WINDOW._replace(default=None)},
    defaults={
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "num_key_value_heads": 8,
        "moe_num_experts": 8,
        "moe_k": 2,
    },
    neutral={"router_jitter_noise": (0, 0.0)},
    names=NAMES,
    rules=decoder_rules({**without(DENSE_LAYER, MLP), **EXPERTS}, NAMES),
    layer_attention=layer_attention,
)

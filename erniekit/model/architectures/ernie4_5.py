"""ERNIE-4.5: dense models, and mixtures of experts with multi-token prediction.

Defaults are those of the configuration classes of transformers 4.55.
"""

from __future__ import annotations

from typing import Any

from erniekit.model.architectures.architecture import ATTENTION_LINEARS, MLP_LINEARS, Architecture, PaddleFiles
from erniekit.model.architectures.plain_decoder import (
    CORRECTION_BIAS,
    DENSE_LAYER,
    EXPERTS,
    SHARED_EXPERTS,
    Routing,
    decoder_rules,
    mtp_rules,
)

_DEFAULTS = {
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "compression_ratio": (1, 1.0),
    "scale_qk_coeff": (1, 1.0),
    "use_rmsnorm": (True,),
    "rope_reorder": (False,),
    "cachekv_quant": (False,),
    "is_quantized": (False,),
}
_PADDLE_FILES = PaddleFiles("paddleformers", "ernie.", grouped_qkv="blocks")
_MOE_LAYER = {**DENSE_LAYER, **EXPERTS, **SHARED_EXPERTS, **CORRECTION_BIAS}

ERNIE4_5 = Architecture(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    own_fields=("use_bias",),
    defaults=_DEFAULTS,
    neutral={**_NEUTRAL, "moe_num_experts": (None, 0), "num_nextn_predict_layers": (None, 0)},
    mtp_rules=mtp_rules(DENSE_LAYER),  # only files may have such layers
    biases=dict.fromkeys((*ATTENTION_LINEARS, *MLP_LINEARS), "use_bias"),
    rotary_interleaved=True,
    paddle_files=_PADDLE_FILES,
)

ERNIE4_5_MOE = Architecture(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    own_fields=(
        "use_bias",
        "moe_num_experts",
        "moe_k",
        "moe_intermediate_size",
        "moe_num_shared_experts",
        "moe_layer_start_index",
        "moe_layer_end_index",
        "moe_layer_interval",
        "moe_norm_min",
        "num_nextn_predict_layers",
    ),
    defaults={
        **_DEFAULTS,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    neutral={
        **_NEUTRAL,
        "moe_gate_act": ("softmax",),
        "moe_norm_gate_logits": (True,),
        "moe_use_hard_gate": (False,),
        "moe_group_experts": (False,),
        "moe_gate": ("top2_fused", "topk"),  # two programs of one computation
        "moe_gate_scale": (False,),
        "use_bias": (False,),  # the head has a bias as well there
    },
    rules=decoder_rules(_MOE_LAYER),
    mtp_rules=mtp_rules(_MOE_LAYER),
    rotary_interleaved=True,
    routing=lambda config: Routing(correction_bias=(1, config.moe_num_experts)),
    paddle_files=_PADDLE_FILES,
)

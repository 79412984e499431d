"""What tells one family of models from another, as one table each. Needs neither Paddle nor NumPy.

Defaults are those of the configuration classes of transformers 4.55, which apply where `config.json` lacks a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from erniekit.errors import ModelFileError

ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
ALWAYS = "always"

# Keys that would change the computation, with the values that change nothing.
_NEUTRAL_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1, 1.0),
}
_STORED_FORMATS = ("pack-quantized", "float-quantized", "nf4")  # of weights in few bits; see model/storage
_NEUTRAL_FOR_ERNIE: dict[str, tuple[Any, ...]] = {
    "compression_ratio": (1, 1.0),
    "scale_qk_coeff": (1, 1.0),
    "use_rmsnorm": (True,),
}
_NEUTRAL_FOR_QWEN: dict[str, tuple[Any, ...]] = {
    "use_sliding_window": (False,),
    "layer_types": (None, "full_attention"),  # of a list, every entry
}
_NEUTRAL_FOR_PADDLENLP: dict[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "rope_scaling_type": (None,),
    "use_long_sequence_strategies": (False,),
}
_NEUTRAL_FOR_MOE: dict[str, tuple[Any, ...]] = {
    "moe_gate_act": ("softmax",),
    "moe_norm_gate_logits": (True,),
    "moe_use_hard_gate": (False,),
    "moe_group_experts": (False,),
    "use_bias": (False,),  # the head has a bias as well there
}


@dataclass(frozen=True)
class Family:
    """How `model_type` names a family, and what its decoder does differently.

    Attributes:
        architecture: the class of `transformers`, for `architectures` in a saved `config.json`.
        rotary_interleaved: rotary embeddings turn channels (2i, 2i + 1) of a head; otherwise (i, i + D / 2).
        qk_norm: queries and keys pass an RMSNorm over each head before they are turned.
        biases: the configuration field that gives a linear its bias, or ALWAYS; linears not named here have none.
        own_fields: fields of ModelConfig that belong to this family and not to all.
        defaults: values of fields whose key is absent.
        head_dim: where the key is absent; None means hidden_size / num_attention_heads.
        neutral: keys that would change the computation, with the values that are available.
    """

    model_type: str
    architecture: str
    rotary_interleaved: bool = False
    qk_norm: bool = False
    biases: Mapping[str, str] = field(default_factory=dict)
    own_fields: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    head_dim: int | None = None
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


MOE_FIELDS = (
    "moe_num_experts",
    "moe_k",
    "moe_intermediate_size",
    "moe_num_shared_experts",
    "moe_layer_start_index",
    "moe_layer_end_index",
    "moe_layer_interval",
    "moe_norm_min",
    "num_nextn_predict_layers",
)

_ERNIE_DEFAULTS = {
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_QWEN_DEFAULTS = {
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

_FAMILIES = (
    Family(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        rotary_interleaved=True,
        biases=dict.fromkeys((*ATTENTION_LINEARS, *MLP_LINEARS), "use_bias"),
        own_fields=("use_bias",),
        defaults=_ERNIE_DEFAULTS,
        neutral={
            **_NEUTRAL_FOR_ERNIE,
            "moe_num_experts": (None, 0),
            "num_nextn_predict_layers": (None, 0),
        },
    ),
    Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        rotary_interleaved=True,
        own_fields=("use_bias", *MOE_FIELDS),
        defaults={
            **_ERNIE_DEFAULTS,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
        neutral={**_NEUTRAL_FOR_ERNIE, **_NEUTRAL_FOR_MOE},
    ),
    Family(
        "llama",
        "LlamaForCausalLM",
        biases={
            **dict.fromkeys(ATTENTION_LINEARS, "attention_bias"),
            **dict.fromkeys(MLP_LINEARS, "mlp_bias"),
        },
        own_fields=("attention_bias", "mlp_bias"),
        defaults={
            "max_position_embeddings": 2048,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
        neutral=_NEUTRAL_FOR_PADDLENLP,
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        biases=dict.fromkeys(("q_proj", "k_proj", "v_proj"), ALWAYS),
        defaults=_QWEN_DEFAULTS,
        neutral={**_NEUTRAL_FOR_QWEN, **_NEUTRAL_FOR_PADDLENLP},
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        qk_norm=True,
        biases=dict.fromkeys(ATTENTION_LINEARS, "attention_bias"),
        own_fields=("attention_bias",),
        defaults=_QWEN_DEFAULTS,
        head_dim=128,
        neutral=_NEUTRAL_FOR_QWEN,
    ),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _FAMILIES}


def family_of(model_type: Any, where: str) -> Family:
    """The family of a `model_type`; ModelFileError, headed by `where`, for an unknown one."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ModelFileError(f"{where}: model_type {model_type!r} is not supported; supported: {known}")
    return FAMILIES[model_type]


def unavailable_values(family: Family, values: Mapping[str, Any]) -> list[str]:
    """One line for each key of a `config.json` that asks for a computation which is not available."""
    problems = []
    for key, neutral in {**_NEUTRAL_EVERYWHERE, **family.neutral}.items():
        if key not in values:
            continue
        entries = values[key] if isinstance(values[key], list) and values[key] else [values[key]]
        if any(entry not in neutral for entry in entries):
            problems.append(f"{key}: {values[key]!r} is not supported; only {neutral[-1]!r} is")
    quantized = values.get("quantization_config")
    if quantized is not None and (not isinstance(quantized, dict) or quantized.get("format") not in _STORED_FORMATS):
        shown = quantized.get("format") or quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        problems.append(
            f"quantization_config: weights as {shown!r} cannot be read; formats: {', '.join(_STORED_FORMATS)}"
        )
    return problems

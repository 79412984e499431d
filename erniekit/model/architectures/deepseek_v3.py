"""DeepSeek-V3: latent attention, and a sigmoid router with a correction bias that chooses among groups of experts.

Defaults are those of transformers 4.55's configuration class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from erniekit.model.architectures.architecture import Architecture, Key
from erniekit.model.architectures.plain_decoder import (
    EXPERTS,
    LAYER_NORMS,
    MLP,
    SHARED_EXPERTS,
    Multipliers,
    Routing,
    Shapes,
    decoder_rules,
    linear_weights,
)
from erniekit.model.architectures.rope_scaling import Frequencies, rotary_frequencies, yarn_growth
from erniekit.model.architectures.sharding import COLUMN_PARALLEL, NORM, REPLICATED_LINEAR, ROW_PARALLEL, ModuleRule

if TYPE_CHECKING:
    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.decoder import DecoderModules

NAMES = {"moe_statics": "gate"}
LATENT_ATTENTION = {
    "self_attn.q_proj": COLUMN_PARALLEL,
    "self_attn.q_a_proj": REPLICATED_LINEAR,
    "self_attn.q_a_layernorm": NORM,
    "self_attn.q_b_proj": COLUMN_PARALLEL,
    "self_attn.kv_a_proj_with_mqa": REPLICATED_LINEAR,
    "self_attn.kv_a_layernorm": NORM,
    "self_attn.kv_b_proj": COLUMN_PARALLEL,
    "self_attn.o_proj": ROW_PARALLEL,
}
ROUTER = {"mlp.gate": ModuleRule("router", ("weight", "e_score_correction_bias"))}


def modules() -> DecoderModules:
    """Return the plain classes, but latent attention; imports Paddle."""
    from erniekit.model.decoder import PLAIN_MODULES
    from erniekit.model.latent_attention import LatentAttention

    return PLAIN_MODULES._replace(attention=LatentAttention)


def attention_shapes(config: ModelConfig) -> Shapes:
    """Return the weights of latent attention; `head_dim` counts the turned channels of a query and key."""
    own, heads, hidden = config.own, config.num_attention_heads, config.hidden_size
    rank, queries = own["q_lora_rank"], heads * qk_head_dim(config)
    if rank is None:
        shapes = linear_weights(config, "q_proj", queries, hidden)
    else:
        shapes = linear_weights(config, "q_a_proj", rank, hidden)
        shapes |= {"q_a_layernorm.weight": (rank,), **linear_weights(config, "q_b_proj", queries, rank)}
    rank, kept = own["kv_lora_rank"], own["qk_nope_head_dim"]
    return {
        **shapes,
        **linear_weights(config, "kv_a_proj_with_mqa", rank + config.head_dim, hidden),
        "kv_a_layernorm.weight": (rank,),
        **linear_weights(config, "kv_b_proj", heads * (kept + own["v_head_dim"]), rank),
        **linear_weights(config, "o_proj", hidden, heads * own["v_head_dim"]),
    }


def qk_head_dim(config: ModelConfig) -> int:
    """Return the channels of a query and key: those that are not turned, then those that are."""
    return config.own["qk_nope_head_dim"] + config.head_dim


def rope_tables(config: ModelConfig) -> tuple[Frequencies]:
    """Return the table that turns the last channels of each query and key."""
    table = rotary_frequencies(config)
    return (table._replace(per_pair=(0.0,) * (config.own["qk_nope_head_dim"] // 2) + table.per_pair),)


def multipliers(config: ModelConfig) -> Multipliers:
    """Return the scale of attention scores, which yarn raises for longer contexts where `mscale_all_dim` is set."""
    scaling = config.rope_scaling or {}
    weight = scaling.get("mscale_all_dim")
    growth = yarn_growth(weight, scaling["factor"]) if weight else 1.0
    return Multipliers(attention=qk_head_dim(config) ** -0.5 * growth**2)


def routing(config: ModelConfig) -> Routing:
    """Return the router of a configuration."""
    own = config.own
    return Routing(
        "sigmoid",
        normalizes=own["norm_topk_prob"],
        correction_bias=(config.moe_num_experts,),
        groups=own["n_group"],
        chosen_groups=own["topk_group"],
        scale=own["routed_scaling_factor"],
    )


def problems(config: ModelConfig) -> list[str]:
    """Return a line for sizes of heads and groups that do not fit."""
    own, lines = config.own, []
    if config.num_key_value_heads != config.num_attention_heads:
        lines.append("num_key_value_heads: latent attention has as many key heads as num_attention_heads")
    if own["qk_nope_head_dim"] % 2 or own["v_head_dim"] > qk_head_dim(config):
        lines.append("qk_nope_head_dim must be even, and v_head_dim at most qk_nope_head_dim + qk_rope_head_dim")
    size, rest = divmod(config.moe_num_experts, own["n_group"])
    if own["n_group"] > 1 and (rest or size < 2):
        lines.append(f"n_group: n_routed_experts {config.moe_num_experts} is no multiple of it with 2 experts or more")
    elif not own["topk_group"] <= own["n_group"] or config.moe_k > own["topk_group"] * size:
        lines.append("topk_group: more than n_group, or its groups have fewer than num_experts_per_tok experts")
    return lines


DEEPSEEK_V3 = Architecture(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    own_fields=(
        "attention_bias",
        "moe_num_experts",
        "moe_k",
        "moe_intermediate_size",
        "moe_num_shared_experts",
        "moe_layer_start_index",
    ),
    key_names={
        "head_dim": "qk_rope_head_dim",
        "moe_num_experts": "n_routed_experts",
        "moe_k": "num_experts_per_tok",
        "moe_num_shared_experts": "n_shared_experts",
        "moe_layer_start_index": "first_k_dense_replace",
    },
    own_keys={
        "q_lora_rank": Key(int, 1, default=1536, nullable=True),
        "kv_lora_rank": Key(int, 1, default=512),
        "qk_nope_head_dim": Key(int, 1, default=128),
        "v_head_dim": Key(int, 1, default=128),
        "n_group": Key(int, 1, default=8),
        "topk_group": Key(int, 1, default=4),
        "norm_topk_prob": Key(bool, default=True),
        "routed_scaling_factor": Key(float, 1e-6, default=2.5),
    },
    aliases={"head_dim": "qk_rope_head_dim"},
    defaults={
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "moe_num_experts": 256,
        "moe_k": 8,
        "moe_intermediate_size": 2048,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 3,
    },
    head_dim=64,
    neutral={
        "rope_interleave": (True,),
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "num_nextn_predict_layers": (0, 1),  # further layers in files, which transformers leaves out, too
    },
    inert_keys=("qk_head_dim", "ep_size", "seq_aux", "aux_loss_alpha"),
    problems=problems,
    small_values={"n_group": 2, "topk_group": 2, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
    names=NAMES,
    rules=decoder_rules({**LAYER_NORMS, **LATENT_ATTENTION, **MLP, **EXPERTS, **ROUTER, **SHARED_EXPERTS}, NAMES),
    modules=modules,
    attention_shapes=attention_shapes,
    qk_head_dim=qk_head_dim,
    biases=dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa", "o_proj"), "attention_bias"),
    multipliers=multipliers,
    rotary_interleaved=True,
    rope_tables=rope_tables,
    routing=routing,
)

"""The plain decoder: what an architecture is where it says nothing else. Needs neither Paddle nor NumPy.

Embedding, N layers of attention and a gated MLP or experts, each behind an RMSNorm, a final norm and a head. Most
families are this decoder with other values; each function here is the default of a field of `Architecture`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from erniekit.model.architectures.rope_scaling import Frequencies, rotary_frequencies
from erniekit.model.architectures.sharding import (
    COLUMN_PARALLEL,
    HEAD_NORM,
    NORM,
    REPLICATED_LINEAR,
    ROUTER,
    ROUTER_CORRECTION,
    ROW_PARALLEL,
    VOCAB_PARALLEL,
    ModuleRule,
    prefixed,
)

if TYPE_CHECKING:
    from paddle import Tensor

    from erniekit.model.architectures.model_config import ModelConfig
    from erniekit.model.decoder import Decoder, DecoderModules

Shapes = dict[str, tuple[int, ...]]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# Rules of modules, by their paths within a layer.
ATTENTION = {
    "self_attn.q_proj": COLUMN_PARALLEL,
    "self_attn.k_proj": COLUMN_PARALLEL,
    "self_attn.v_proj": COLUMN_PARALLEL,
    "self_attn.o_proj": ROW_PARALLEL,
}
QK_NORM = {"self_attn.q_norm": HEAD_NORM, "self_attn.k_norm": HEAD_NORM}
MLP = {"mlp.gate_proj": COLUMN_PARALLEL, "mlp.up_proj": COLUMN_PARALLEL, "mlp.down_proj": ROW_PARALLEL}
LAYER_NORMS = {"input_layernorm": NORM, "post_attention_layernorm": NORM}
DENSE_LAYER = {**LAYER_NORMS, **ATTENTION, **MLP}
EXPERTS = {
    "mlp.gate": ROUTER,
    "mlp.experts.{expert}.gate_proj": REPLICATED_LINEAR,
    "mlp.experts.{expert}.up_proj": REPLICATED_LINEAR,
    "mlp.experts.{expert}.down_proj": REPLICATED_LINEAR,
}
SHARED_EXPERTS = {
    "mlp.shared_experts.gate_proj": COLUMN_PARALLEL,
    "mlp.shared_experts.up_proj": COLUMN_PARALLEL,
    "mlp.shared_experts.down_proj": ROW_PARALLEL,
}
CORRECTION_BIAS = {"mlp.moe_statics": ROUTER_CORRECTION}


def decoder_rules(layer: dict[str, ModuleRule]) -> dict[str, ModuleRule]:
    """Return the rules of a decoder whose layers have these modules."""
    return {
        "model.embed_tokens": VOCAB_PARALLEL,
        **prefixed("model.layers.{layer}.", layer),
        "model.norm": NORM,
        "lm_head": VOCAB_PARALLEL,
    }


def mtp_rules(layer: dict[str, ModuleRule]) -> dict[str, ModuleRule]:
    """Return the rules of multi-token prediction layers, which a run may leave out (`Architecture.mtp_rules`)."""
    return {
        **prefixed("model.mtp_block.{depth}.", layer),
        "model.mtp_emb_norm.{depth}": NORM,
        "model.mtp_hidden_norm.{depth}": NORM,
        "model.mtp_linear_proj.{depth}": REPLICATED_LINEAR,
    }


class LayerAttention(NamedTuple):
    """Which tokens a layer attends to, and how it turns queries and keys.

    Attributes:
        window: a query sees the keys of the last `window` positions, its own included; None: all keys before it.
        rope: which of the architecture's `rope_tables` the layer uses.
    """

    window: int | None = None
    rope: int = 0


def full_attention(config: ModelConfig, layer: int) -> LayerAttention:
    """Return what every layer of a plain decoder does: see all tokens of the document so far, with the one table."""
    return LayerAttention()


def one_rope_table(config: ModelConfig) -> tuple[Frequencies, ...]:
    """Return the one table of a plain decoder, with the configuration's theta and `rope_scaling`."""
    return (rotary_frequencies(config),)


def plain_modules() -> DecoderModules:
    """Return the classes that a plain decoder is made of; imports Paddle."""
    from erniekit.model.decoder import PLAIN_MODULES

    return PLAIN_MODULES


def embed_tokens(decoder: Decoder, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the embeddings [B, S, H] of the tokens `input_ids` [B, S], which are all that a plain decoder reads."""
    return decoder.embedding(inputs["input_ids"])


def has_experts(config: ModelConfig, layer: int) -> bool:
    """Return whether a layer has experts in place of its MLP, from the `moe_layer_*` fields."""
    last = config.num_hidden_layers - 1 if config.moe_layer_end_index == -1 else config.moe_layer_end_index
    in_range = config.moe_layer_start_index <= layer <= last
    return config.moe_num_experts > 0 and in_range and (layer + 1) % config.moe_layer_interval == 0


def tensor_parallel_sizes(config: ModelConfig) -> dict[str, int]:
    """Return the sizes that the tensor-parallel degree must divide, by the names of the configuration's keys."""
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
    }
    if not all(config.is_moe_layer(layer) for layer in range(config.num_hidden_layers)):
        sizes["intermediate_size"] = config.intermediate_size
    if config.moe_num_shared_experts:  # one wider MLP; routed experts are never cut
        name = "moe_num_shared_experts x moe_intermediate_size"
        sizes[name] = config.moe_num_shared_experts * config.moe_intermediate_size
    return sizes


def decoder_shapes(config: ModelConfig) -> Shapes:
    """Every weight's Hugging Face name and shape (linear weights are [out, in]), in the order of the decoder."""
    shapes: Shapes = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_hidden_layers):
        shapes |= _with_prefix(f"model.layers.{layer}.", _layer_shapes(config, config.is_moe_layer(layer)))
    shapes["model.norm.weight"] = (config.hidden_size,)
    shapes |= _mtp_shapes(config)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig, moe: bool) -> Shapes:
    norm = (config.hidden_size,)
    return {
        "input_layernorm.weight": norm,
        **_with_prefix("self_attn.", _attention_shapes(config)),
        "post_attention_layernorm.weight": norm,
        **_with_prefix("mlp.", _moe_shapes(config) if moe else _mlp_shapes(config, config.intermediate_size)),
    }


def _attention_shapes(config: ModelConfig) -> Shapes:
    hidden = config.hidden_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes = {
        **_linear(config, "q_proj", queries, hidden),
        **_linear(config, "k_proj", keys, hidden),
        **_linear(config, "v_proj", keys, hidden),
        **_linear(config, "o_proj", hidden, queries),
    }
    if config.architecture.qk_norm:
        shapes |= {"q_norm.weight": (config.head_dim,), "k_norm.weight": (config.head_dim,)}
    return shapes


def _mlp_shapes(config: ModelConfig, inner: int) -> Shapes:
    return {
        **_linear(config, "gate_proj", inner, config.hidden_size),
        **_linear(config, "up_proj", inner, config.hidden_size),
        **_linear(config, "down_proj", config.hidden_size, inner),
    }


def _moe_shapes(config: ModelConfig) -> Shapes:
    """The router, its correction bias, the routed experts and, as one wider MLP, the shared ones."""
    experts, inner = config.moe_num_experts, config.moe_intermediate_size
    shapes: Shapes = {"gate.weight": (experts, config.hidden_size)}
    if config.architecture.router_correction_bias:
        shapes["moe_statics.e_score_correction_bias"] = (1, experts)
    for expert in range(experts):
        shapes |= _with_prefix(f"experts.{expert}.", _mlp_shapes(config, inner))
    if config.moe_num_shared_experts:
        shapes |= _with_prefix("shared_experts.", _mlp_shapes(config, inner * config.moe_num_shared_experts))
    return shapes


def _mtp_shapes(config: ModelConfig) -> Shapes:
    """Multi-token prediction: per depth d one more decoder layer, built as layer d is, and the linear that feeds it."""
    hidden = config.hidden_size
    shapes: Shapes = {}
    for depth in range(config.num_nextn_predict_layers):
        shapes |= _with_prefix(f"model.mtp_block.{depth}.", _layer_shapes(config, config.is_moe_layer(depth)))
        shapes[f"model.mtp_emb_norm.{depth}.weight"] = (hidden,)
        shapes[f"model.mtp_hidden_norm.{depth}.weight"] = (hidden,)
        shapes[f"model.mtp_linear_proj.{depth}.weight"] = (hidden, 2 * hidden)
    return shapes


def _linear(config: ModelConfig, name: str, outputs: int, inputs: int) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (outputs, inputs)}
    if config.has_bias(name):
        shapes[f"{name}.bias"] = (outputs,)
    return shapes


def _with_prefix(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}

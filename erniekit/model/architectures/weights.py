"""The name and shape of every weight of a model, as Hugging Face stores them. Needs neither Paddle nor NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from erniekit.model.architectures.model_config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def weight_shapes(config: ModelConfig) -> Shapes:
    """Every weight's Hugging Face name and shape (linear weights are [out, in]), in the order of the decoder."""
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_hidden_layers):
        moe = config.is_moe_layer(layer)
        shapes |= _prefixed(f"model.layers.{layer}.", _layer_shapes(config, moe))
    shapes["model.norm.weight"] = (config.hidden_size,)
    shapes |= _mtp_shapes(config)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig, moe: bool) -> Shapes:
    norm = (config.hidden_size,)
    return {
        "input_layernorm.weight": norm,
        **_prefixed("self_attn.", _attention_shapes(config)),
        "post_attention_layernorm.weight": norm,
        **_prefixed("mlp.", _moe_shapes(config) if moe else _mlp_shapes(config, config.intermediate_size)),
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
    if config.family.qk_norm:
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
    shapes: Shapes = {
        "gate.weight": (experts, config.hidden_size),
        "moe_statics.e_score_correction_bias": (1, experts),
    }
    for expert in range(experts):
        shapes |= _prefixed(f"experts.{expert}.", _mlp_shapes(config, inner))
    if config.moe_num_shared_experts:
        shapes |= _prefixed("shared_experts.", _mlp_shapes(config, inner * config.moe_num_shared_experts))
    return shapes


def _mtp_shapes(config: ModelConfig) -> Shapes:
    """Multi-token prediction: per depth d one more decoder layer, built as layer d is, and the linear that feeds it."""
    hidden = config.hidden_size
    shapes: Shapes = {}
    for depth in range(config.num_nextn_predict_layers):
        shapes |= _prefixed(f"model.mtp_block.{depth}.", _layer_shapes(config, config.is_moe_layer(depth)))
        shapes[f"model.mtp_emb_norm.{depth}.weight"] = (hidden,)
        shapes[f"model.mtp_hidden_norm.{depth}.weight"] = (hidden,)
        shapes[f"model.mtp_linear_proj.{depth}.weight"] = (hidden, 2 * hidden)
    return shapes


def _linear(config: ModelConfig, name: str, outputs: int, inputs: int) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (outputs, inputs)}
    if config.has_bias(name):
        shapes[f"{name}.bias"] = (outputs,)
    return shapes


def _prefixed(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}

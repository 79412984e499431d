"""The plain decoder: what an architecture is where it says nothing else. Needs neither Paddle nor NumPy.

Embedding, N layers of attention and a gated MLP or experts, each behind an RMSNorm, a final norm and a head. Most
families are this decoder with other values; each function here is the default of a field of `Architecture`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from erniekit.model.architectures.rope_scaling import Frequencies, rotary_frequencies
from erniekit.model.architectures.sharding import (
    COLUMN_PARALLEL,
    HEAD_NORM,
    NORM,
    REPLICATED_LINEAR,
    ROUTER,
    ROUTER_CORRECTION,
    ROW_PARALLEL,
    SHARDED_NORM,
    SLICED_LINEAR,
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
PROJECTION_QK_NORM = {"self_attn.q_norm": SHARDED_NORM, "self_attn.k_norm": SHARDED_NORM}
MLP = {"mlp.gate_proj": COLUMN_PARALLEL, "mlp.up_proj": COLUMN_PARALLEL, "mlp.down_proj": ROW_PARALLEL}
SINKS = {"self_attn": ModuleRule("other", ("sinks",), axes={"sinks": 0})}
# The norms that a layer may have; `Architecture.names` says what files call them.
ATTENTION_INPUT_NORM, ATTENTION_OUTPUT_NORM = "input_layernorm", "attention_output_norm"
MLP_INPUT_NORM, MLP_OUTPUT_NORM = "post_attention_layernorm", "mlp_output_norm"
PRE_NORMS = (ATTENTION_INPUT_NORM, MLP_INPUT_NORM)
POST_NORMS = (ATTENTION_OUTPUT_NORM, MLP_OUTPUT_NORM)
FUSED_MLP = {"mlp.gate_up_proj": SLICED_LINEAR, "mlp.down_proj": ROW_PARALLEL}
LAYER_NORMS = dict.fromkeys(PRE_NORMS, NORM)
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
SHARED_EXPERT_GATE = {"mlp.shared_expert_gate": ROUTER}
CORRECTION_BIAS = {"mlp.moe_statics": ROUTER_CORRECTION}


def decoder_rules(
    layer: dict[str, ModuleRule], names: Mapping[str, str] | None = None, norm: ModuleRule = NORM
) -> dict[str, ModuleRule]:
    """Return the rules of a decoder whose layers have these modules.

    Args:
        names: the architecture's `names`.
        norm: the rule of the final norm.
    """
    return {
        "model.embed_tokens": VOCAB_PARALLEL,
        **{f"model.layers.{{layer}}.{renamed(path, names or {})}": rule for path, rule in layer.items()},
        "model.norm": norm,
        "lm_head": VOCAB_PARALLEL,
    }


def without(rules: dict[str, ModuleRule], left_out: dict[str, ModuleRule]) -> dict[str, ModuleRule]:
    """Return the rules of all modules but those that `left_out` names."""
    return {path: rule for path, rule in rules.items() if path not in left_out}


def renamed(path: str, names: Mapping[str, str]) -> str:
    """Return a path with each of its parts as the architecture's `names` say."""
    return ".".join(names.get(part, part) for part in path.split("."))


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
        rope: which of the architecture's `rope_tables` the layer uses; None: nothing is turned (NoPE; Kazemnejad et
            al., 2023, arXiv:2305.19466).
    """

    window: int | None = None
    rope: int | None = 0


class Multipliers(NamedTuple):
    """Constants that multiply what passes through a decoder.

    Attributes:
        embedding: of the embeddings that enter the first layer.
        residual: of the outputs of attention and MLP, before they are added.
        attention: of the products of queries and keys; None: 1 / sqrt(head_dim).
        logits: of the logits.
    """

    embedding: float = 1.0
    residual: float = 1.0
    attention: float | None = None
    logits: float = 1.0


class Routing(NamedTuple):
    """How a router chooses the experts of a token, and weighs them.

    Attributes:
        scores: what makes scores of logits; the likeliest experts are chosen, and their scores are their weights.
        normalizes: whether the weights of a token's experts are divided by their sum.
        bias: whether the logits have a bias.
        correction_bias: the shape of a bias that is added to scores for the choice alone, and that no gradient
            reaches; None: there is none.
        groups, chosen_groups: experts lie in `groups` equal groups, of which only those with the largest sums of two
            scores are chosen from (DeepSeek-V3, 2024, arXiv:2412.19437).
        scale: multiplies the weights.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalizes: bool = True
    bias: bool = False
    correction_bias: tuple[int, ...] | None = None
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0


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
    embeddings_BSH = decoder.embedding(inputs["input_ids"])
    multiplier = decoder.config.architecture.multipliers(decoder.config).embedding
    return embeddings_BSH if multiplier == 1.0 else embeddings_BSH * multiplier


def has_experts(config: ModelConfig, layer: int) -> bool:
    """Return whether a layer has experts in place of its MLP, from the `moe_layer_*` fields."""
    last = config.num_hidden_layers - 1 if config.moe_layer_end_index == -1 else config.moe_layer_end_index
    in_range = config.moe_layer_start_index <= layer <= last
    return config.moe_num_experts > 0 and in_range and (layer + 1) % config.moe_layer_interval == 0


def shared_experts_size(config: ModelConfig) -> int:
    """Return the channels of the one wider MLP that the shared experts are; 0: there are none."""
    return config.moe_num_shared_experts * config.moe_intermediate_size


def tensor_parallel_sizes(config: ModelConfig) -> dict[str, int]:
    """Return the sizes that the tensor-parallel degree must divide, by the names of the configuration's keys."""
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
    }
    if not all(config.is_moe_layer(layer) for layer in range(config.num_hidden_layers)):
        sizes["intermediate_size"] = config.intermediate_size
    if config.scored:
        sizes["hidden_size"] = config.hidden_size
    shared = config.architecture.shared_experts_size(config)
    if shared:  # routed experts are never cut
        sizes["size of the shared experts"] = shared
    return sizes


def decoder_shapes(config: ModelConfig) -> Shapes:
    """Return every weight's Hugging Face name and shape (linear weights are [out, in]), in the decoder's order."""
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
    architecture = config.architecture
    norms: dict[str, Shapes] = {name: {f"{name}.weight": norm} for name in architecture.norms}
    shapes: Shapes = {
        **norms.get(ATTENTION_INPUT_NORM, {}),
        **_with_prefix("self_attn.", architecture.attention_shapes(config)),
        **norms.get(ATTENTION_OUTPUT_NORM, {}),
        **norms.get(MLP_INPUT_NORM, {}),
        **_with_prefix("mlp.", _moe_shapes(config) if moe else _mlp_shapes(config, config.intermediate_size)),
        **norms.get(MLP_OUTPUT_NORM, {}),
    }
    return {renamed(name, architecture.names): shape for name, shape in shapes.items()}


def attention_shapes(config: ModelConfig) -> Shapes:
    """Return the weights of grouped-query attention."""
    hidden = config.hidden_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes = {
        **linear_weights(config, "q_proj", queries, hidden),
        **linear_weights(config, "k_proj", keys, hidden),
        **linear_weights(config, "v_proj", keys, hidden),
        **linear_weights(config, "o_proj", hidden, queries),
    }
    if config.architecture.qk_norm is not None:
        whole = config.architecture.qk_norm == "projection"
        shapes["q_norm.weight"] = (queries if whole else config.head_dim,)
        shapes["k_norm.weight"] = (keys if whole else config.head_dim,)
    return shapes


def _mlp_shapes(config: ModelConfig, inner: int) -> Shapes:
    if config.architecture.fused_gate_up:
        gate_up = linear_weights(config, "gate_up_proj", 2 * inner, config.hidden_size)
    else:
        gate_up = {
            **linear_weights(config, "gate_proj", inner, config.hidden_size),
            **linear_weights(config, "up_proj", inner, config.hidden_size),
        }
    return {**gate_up, **linear_weights(config, "down_proj", config.hidden_size, inner)}


def _moe_shapes(config: ModelConfig) -> Shapes:
    """The router, its correction bias, the routed experts and, as one wider MLP, the shared ones."""
    experts, inner = config.moe_num_experts, config.moe_intermediate_size
    architecture = config.architecture
    routing, shared = architecture.routing(config), architecture.shared_experts_size(config)
    shapes: Shapes = {"gate.weight": (experts, config.hidden_size)}
    if routing.bias:
        shapes["gate.bias"] = (experts,)
    if routing.correction_bias is not None:
        shapes["moe_statics.e_score_correction_bias"] = routing.correction_bias
    for expert in range(experts):
        shapes |= _with_prefix(f"experts.{expert}.", _mlp_shapes(config, inner))
    if shared:
        shapes |= _with_prefix("shared_experts.", _mlp_shapes(config, shared))
    if architecture.shared_expert_gate:
        shapes["shared_expert_gate.weight"] = (1, config.hidden_size)
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


def linear_weights(config: ModelConfig, name: str, outputs: int, inputs: int) -> Shapes:
    """Return the weight of a linear layer and, where the architecture gives it one, its bias."""
    shapes: Shapes = {f"{name}.weight": (outputs, inputs)}
    if config.has_bias(name):
        shapes[f"{name}.bias"] = (outputs,)
    return shapes


def _with_prefix(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}

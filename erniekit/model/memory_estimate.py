"""How much memory training takes, from the model's shape alone. Needs neither Paddle nor NumPy."""

from __future__ import annotations

from erniekit.model.configuration import ModelConfig

_FLOAT32 = 4
_ADAM_MOMENTS = 2
CHUNK_LOGITS = 4 << 20  # head.CHUNK_LOGITS; a test compares the two
KEPT_SCORES = 4 << 20  # attention.KEEP_SCORES_UP_TO; likewise


def training_memory(
    model_config: ModelConfig,
    *,
    batch_size: int,
    max_seq_len: int,
    trainable: int | None = None,
    recomputed_layers: int = 0,
    fused_head: bool = False,
    dense_mask: bool = False,
    reference_copy: bool = False,
    bytes_per_value: int = _FLOAT32,
) -> dict[str, int]:
    """Bytes by purpose for one device and one micro-batch of full rows; `total` is their sum.

    Args:
        batch_size: rows (packs) in a micro-batch.
        trainable: how many parameters are trained; default all.
        recomputed_layers: how many layers keep only their input and compute the rest again in backward.
        fused_head: the logits are never whole (`use_fused_head_and_loss_fn`).
        dense_mask: FlashMask is switched off, so a B x S x S mask and whole score matrices exist.
        reference_copy: a second, frozen model is there as well.
        bytes_per_value: of weights and activations; gradients and optimizer states count as float32.
    """
    parameters = model_config.parameter_count()
    trainable = parameters if trainable is None else trainable
    tokens = batch_size * max_seq_len
    hidden = model_config.hidden_size
    moe = [model_config.is_moe_layer(number) for number in range(model_config.num_hidden_layers)]
    moe += [model_config.is_moe_layer(depth) for depth in range(model_config.num_nextn_predict_layers)]
    values = [_layer_values(model_config, is_moe, batch_size, max_seq_len, dense_mask) for is_moe in moe]
    layers, layer = len(values), max(values)
    # One layer's values exist a second time as gradients while it is in backward.
    recomputed = min(recomputed_layers, layers)
    kept = recomputed * tokens * hidden + sum(values[: layers - recomputed]) + (2 if recomputed else 1) * layer
    heads = model_config.num_attention_heads + model_config.num_key_value_heads
    shared = 3 * tokens * hidden + 2 * tokens * heads * model_config.head_dim  # embedding, final norm; rotary tables
    memory = {
        "parameters": parameters * bytes_per_value,
        "reference": parameters * bytes_per_value if reference_copy else 0,
        "gradients": trainable * _FLOAT32,
        "optimizer": trainable * _ADAM_MOMENTS * _FLOAT32,
        "activations": (kept + shared) * bytes_per_value,
        "logits": _logit_values(model_config, tokens, fused_head, trainable) * bytes_per_value,
        "attention_mask": batch_size * max_seq_len * max_seq_len * _FLOAT32 if dense_mask else 0,
    }
    return {**memory, "total": sum(memory.values())}


def _layer_values(config: ModelConfig, moe: bool, batch_size: int, max_seq_len: int, dense_mask: bool) -> int:
    """Numbers one decoder layer keeps between forward and backward."""
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    per_token = (
        4 * config.hidden_size  # the two residual streams and the two normalised inputs
        + 2 * queries  # queries and attention's output
        + 2 * keys
        + (_expert_values(config) if moe else 3 * config.intermediate_size)  # gate, up, and their product
    )
    square = config.num_attention_heads * batch_size * max_seq_len * max_seq_len
    scores = square if dense_mask else min(square // 2, KEPT_SCORES)
    return batch_size * max_seq_len * per_token + scores


def _expert_values(config: ModelConfig) -> int:
    """Per token: inputs and outputs of its experts, side by side and in order, what they keep, and the router's."""
    experts = config.moe_k + config.moe_num_shared_experts
    return (
        3 * config.moe_k * config.hidden_size + 3 * experts * config.moe_intermediate_size + 3 * config.moe_num_experts
    )


def _logit_values(config: ModelConfig, tokens: int, fused_head: bool, trainable: int) -> int:
    head = config.vocab_size * config.hidden_size
    losses = 1 + config.num_nextn_predict_layers  # each keeps its own until backward begins
    if fused_head:
        chunk = min(max(CHUNK_LOGITS, head // 4), tokens * config.vocab_size)
        # The gradients of head and hidden states are made with the loss; a chunk's share of the former comes on top.
        return chunk + losses * tokens * config.hidden_size + ((losses + 1) * head if trainable >= head else 0)
    return (losses + 1) * tokens * config.vocab_size  # probabilities, and first the logits, then their gradient

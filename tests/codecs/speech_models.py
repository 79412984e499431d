"""Tiny speech models that ours are compared with."""

from __future__ import annotations

from typing import Any

TINY: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": [8, 12, 10],
    "conv_stride": [5, 2, 2],
    "conv_kernel": [10, 3, 2],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}
LARGE = {"feat_extract_norm": "layer", "conv_bias": True, "do_stable_layer_norm": True}
# Every case: its name, the model type, and what differs from TINY.
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("hubert base", "hubert", {}),
    ("hubert large", "hubert", LARGE),
    ("hubert with batch norm", "hubert", {"conv_pos_batch_norm": True, "conv_bias": True}),
    ("hubert without norm of features", "hubert", {"feat_proj_layer_norm": False, "layer_norm_eps": 1e-3}),
    ("wav2vec2 base", "wav2vec2", {"num_conv_pos_embeddings": 7}),
    ("wav2vec2 large", "wav2vec2", {**LARGE, "hidden_act": "gelu_new", "conv_kernel": [10, 3, 3]}),
    ("wav2vec2 mixed", "wav2vec2", {"do_stable_layer_norm": True, "feat_extract_activation": "relu"}),
    ("wav2vec2 with adapters of a language", "wav2vec2", {**LARGE, "adapter_attn_dim": 6}),
)
LENGTHS = (30, 35, 400, 403, 1237, 2000)  # samples; 30 are the fewest that give a frame with the kernels of TINY

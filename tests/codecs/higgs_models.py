"""Tiny tokenizers of Higgs Audio v2 that ours are compared with."""

from __future__ import annotations

from typing import Any

TINY: dict[str, Any] = {
    "sample_rate": 24_000,
    "semantic_sample_rate": 16_000,
    "downsample_factor": 320,
    "codebook_size": 32,
    "codebook_dim": 6,
    "target_bandwidths": [0.2, 0.5],
    "acoustic_model_config": {
        "model_type": "dac",
        "encoder_hidden_size": 4,
        "downsampling_ratios": [4, 5, 6, 8],
        "decoder_hidden_size": 32,
        "upsampling_ratios": [4, 5, 6, 8],
        "hidden_size": 10,
    },
    "semantic_model_config": {
        "model_type": "hubert",
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 20,
        "conv_dim": [8, 8, 8],
        "conv_stride": [5, 8, 8],
        "conv_kernel": [5, 16, 9],  # a hop of 320 and 400 samples for a frame, as published
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 2,
    },
}
# Every case: its name, and what differs from TINY.
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as published", {}),
    (
        "one rate, widening blocks, dilations",
        {
            "semantic_sample_rate": 24_000,
            "channel_ratios": [2, 1],
            "block_dilations": [1, 3],
            "unit_kernel_size": 5,
            "kernel_size": 5,
        },
    ),
)
SAMPLES = (777, 1920, 2891)  # of the recorded sounds; a frame has 960

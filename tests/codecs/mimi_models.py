"""Tiny Mimis that ours are compared with."""

from __future__ import annotations

from typing import Any

TINY: dict[str, Any] = {
    "sampling_rate": 800,
    "hidden_size": 16,
    "num_filters": 4,
    "upsampling_ratios": [4, 2],
    "codebook_size": 32,
    "codebook_dim": 8,
    "vector_quantization_hidden_dimension": 8,
    "num_quantizers": 4,
    "upsample_groups": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
# Every case: its name, and what differs from TINY.
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as published", {}),
    (
        "shortcuts, two residual layers, shared key heads, biases",
        {
            "use_conv_shortcut": True,
            "num_residual_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "attention_bias": True,
        },
    ),
    (
        "two semantic levels, no projections",
        {"num_semantic_quantizers": 2, "codebook_dim": 16, "vector_quantization_hidden_dimension": 16},
    ),
    ("not causal, reflected", {"use_causal_conv": False, "pad_mode": "reflect", "upsample_groups": 4}),
    ("replicated, trimmed on both sides", {"pad_mode": "replicate", "trim_right_ratio": 0.5, "rope_theta": 50.0}),
    (
        "odd ratios, other kernels",
        {"upsampling_ratios": [3, 5], "kernel_size": 5, "last_kernel_size": 4, "compress": 1, "frame_rate": 27},
    ),
)
SAMPLES = 803  # of the recorded sounds
LENGTHS = (1, 2, 15, 16, 17, 401, 803, 1024)

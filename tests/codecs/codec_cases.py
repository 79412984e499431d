"""Tiny neural codecs that ours are compared with: EnCodec and DAC."""

from __future__ import annotations

from typing import Any

TINY_ENCODEC: dict[str, Any] = {
    "target_bandwidths": [1.5, 3.0, 6.0],
    "hidden_size": 10,
    "num_filters": 4,
    "codebook_size": 16,
    "upsampling_ratios": [5, 4, 2],
    "sampling_rate": 4000,
}  # 100 frames/s of 400 bit/s for each level: 3, 7 and 15 levels
CHUNKS = {
    "audio_channels": 2,
    "normalize": True,
    "chunk_length_s": 0.25,
    "overlap": 0.04,
    "norm_type": "time_group_norm",
    "use_causal_conv": False,
}
# Every case: its name, and what differs from TINY_ENCODEC.
ENCODEC_CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("causal, as at 24 kHz", {}),
    ("two channels in chunks, as at 48 kHz", CHUNKS),
    (
        "other kernels, identity, trimmed on both sides",
        {
            "kernel_size": 6,
            "last_kernel_size": 3,
            "residual_kernel_size": 5,
            "num_residual_layers": 2,
            "dilation_growth_rate": 3,
            "use_conv_shortcut": False,
            "trim_right_ratio": 0.4,
            "compress": 4,
            "num_lstm_layers": 1,
        },
    ),
    ("not causal, zeros, normalised as a whole", {"use_causal_conv": False, "pad_mode": "constant", "normalize": True}),
    ("chunks, causal, copies", {**CHUNKS, "audio_channels": 1, "use_causal_conv": True, "pad_mode": "replicate"}),
)
ENCODEC_LENGTHS = (1, 7, 39, 40, 41, 997, 1000, 1021, 4003)  # samples; frames have 40, chunks 1000

TINY_DAC: dict[str, Any] = {
    "encoder_hidden_size": 4,
    "decoder_hidden_size": 32,
    "downsampling_ratios": [2, 4, 5],
    "n_codebooks": 6,
    "codebook_size": 32,
    "codebook_dim": 5,
    "sampling_rate": 4000,
}
DAC_CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("an odd ratio, as at 16 and 24 kHz", {}),
    ("even ratios, as at 44.1 kHz", {"downsampling_ratios": [2, 4, 8], "codebook_dim": 8}),
)
DAC_LENGTHS = (1, 7, 39, 40, 41, 641, 997, 4003)

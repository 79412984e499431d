"""Tiny neural codecs that ours are compared with: EnCodec and DAC. Imports nothing of the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.codecs.seeded_folders import seeded_sound, seeded_tensor

RECORDED = Path(__file__).parent / "recorded/encodec_dac.npz"
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
TINY = {"encodec": TINY_ENCODEC, "dac": TINY_DAC}
CASES = {"encodec": ENCODEC_CASES, "dac": DAC_CASES}
RECORDED_LENGTH = 1021  # samples of the recorded sound


def case_sound(name: str, channels: int = 1, samples: int = RECORDED_LENGTH) -> np.ndarray:
    """Return float32 [channels, samples]."""
    return np.stack([seeded_sound(f"{name} {samples} {channel}", samples) for channel in range(channels)])


def codec_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the seeded weights of a tiny codec; what DAC adds to its states is small, or sound is all -1 and 1."""
    values = seeded_tensor(name, shape)
    return values * np.float32(0.1) if ".res_unit" in name and ".conv2." in name else values


def write_codec(folder: Path, model_type: str, number: int, **changes: Any) -> Path:
    """Write the folder of a case of CASES[model_type], with the weights that transformers would save."""
    _, case = CASES[model_type][number]
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": model_type, **TINY[model_type], **case, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    with np.load(RECORDED) as recorded:
        shapes = json.loads(bytes(recorded[f"{model_type}/{number}/shapes"]))
    save_file({name: codec_tensor(name, tuple(shape)) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder

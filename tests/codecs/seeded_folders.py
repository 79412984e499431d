"""Folders of codecs with weights from a seed, the same for ours and for transformers. Imports nothing of the package,
because environments without Paddle use it, too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.model.seeded_weights import seeded_weight

SEED = 15
# Statistics and magnitudes, which are above 0; a Snake's alpha, too.
_POSITIVE = ("running_var", "cluster_usage", "cluster_size", "weight_g", "original0", "alpha", "inited", "initialized")


def seeded_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a float32 tensor that keeps the scale of what goes through it, roughly."""
    values = seeded_weight(name, shape, SEED)
    if name.endswith(_POSITIVE):
        return 0.7 + 0.5 * np.abs(values)
    if name == "acoustic_decoder.conv2.weight":
        values = values * np.float32(0.02)  # nothing else keeps this sound from -1 to 1
    if name.endswith(("embed", "embed_sum", "codebook.weight")):
        return values
    if len(shape) < 2:
        return values if name.endswith("norm.weight") else values * np.float32(0.3)  # sound is heard behind the biases
    return values * np.float32(4 / np.sqrt(np.prod(shape[1:])))  # seeded weights have a spread of 1/4


def seeded_sound(name: str, samples: int) -> np.ndarray:
    """Return float32[samples]: noise that is louder in some places than in others, and a tone that rises."""
    noise, time = seeded_weight(f"{name} noise", (samples,), SEED), np.arange(samples)
    return ((noise + 0.3 * np.sin(time**1.5 / 300)) * np.cos(time / 97) + 0.02).astype(np.float32)


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    preprocessor: Mapping[str, Any] | None = None,
) -> Path:
    """Write `config.json`, the seeded weights, and `preprocessor_config.json` if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if preprocessor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    save_file({name: seeded_tensor(name, tuple(shape)) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder

#!/usr/bin/env python3
"""Record what transformers 4 computes with tiny codecs and speech models, for the plain test run.

    python tests/parity/record_codecs.py

Needs the parity extra. The weights and sounds are those of tests/codecs/seeded_folders.py, and are not stored.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests.codecs import mimi_models, speech_models  # noqa: E402
from tests.codecs.seeded_folders import seeded_sound, seeded_tensor  # noqa: E402

TARGET = ROOT / "tests/codecs/recorded"


def seeded_model(model: torch.nn.Module) -> dict[str, list[int]]:
    """Give a model its seeded weights; return their shapes by the names that a folder has."""
    values = {name: torch.tensor(seeded_tensor(name, tuple(v.shape))) for name, v in model.state_dict().items()}
    model.load_state_dict(values)
    model.eval()
    return {name: list(value.shape) for name, value in values.items()}


def as_bytes(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def record_speech_models(target: Path) -> None:
    """Write speech_models.npz: for each case its facts and every hidden state, float32 [layers + 1, T, H]."""
    classes = {"hubert": transformers.HubertModel, "wav2vec2": transformers.Wav2Vec2Model}
    recorded: dict[str, np.ndarray] = {}
    for number, (name, model_type, changes) in enumerate(speech_models.CASES):
        config = {**speech_models.TINY, **changes}
        model = classes[model_type](classes[model_type].config_class(**config))
        shapes = seeded_model(model)
        facts = {"name": name, "config": {"model_type": model_type, **config}, "shapes": shapes}
        with torch.no_grad():
            sound = torch.tensor(seeded_sound(name, 403))[None]
            states = model(sound, output_hidden_states=True).hidden_states
        recorded[f"{number}/facts"] = as_bytes(facts)
        recorded[f"{number}/states"] = torch.cat(states).numpy()
    np.savez_compressed(target / "speech_models.npz", **recorded)


def record_mimi(target: Path) -> None:
    """Write mimi.npz: for each case its facts, the codes int16 [levels, T] of a sound, and the sound of these codes."""
    recorded: dict[str, np.ndarray] = {}
    for number, (name, changes) in enumerate(mimi_models.CASES):
        config = {**mimi_models.TINY, **changes}
        model = transformers.MimiModel(transformers.MimiConfig(**config))
        shapes = seeded_model(model)
        with torch.no_grad():
            codes = model.encode(torch.tensor(seeded_sound(name, mimi_models.SAMPLES))[None, None]).audio_codes
            sound = model.decode(codes).audio_values
        recorded[f"{number}/facts"] = as_bytes(
            {"name": name, "config": {"model_type": "mimi", **config}, "shapes": shapes}
        )
        recorded[f"{number}/codes"] = codes[0].numpy().astype(np.int16)
        recorded[f"{number}/sound"] = sound[0, 0].numpy()
    np.savez_compressed(target / "mimi.npz", **recorded)


def main() -> None:
    TARGET.mkdir(exist_ok=True)
    record_speech_models(TARGET)
    record_mimi(TARGET)
    for path in sorted(TARGET.glob("*.npz")):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

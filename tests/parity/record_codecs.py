#!/usr/bin/env python3
"""Record what transformers 4 computes with tiny codecs and speech models, for the plain test run.

    python tests/parity/record_codecs.py

Needs the parity extra. The weights and sounds are those of tests/codecs/seeded_folders.py, and are not stored.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests.codecs import codec_cases, mimi_models, speech_models  # noqa: E402
from tests.codecs.seeded_folders import seeded_sound, seeded_tensor  # noqa: E402

TARGET = ROOT / "tests/codecs/recorded"


def seeded_model(
    model: torch.nn.Module, seeded: Callable[[str, tuple[int, ...]], np.ndarray] = seeded_tensor
) -> dict[str, list[int]]:
    """Give a model its seeded weights; return their shapes by the names that a folder has."""
    values = {name: torch.tensor(seeded(name, tuple(v.shape))) for name, v in model.state_dict().items()}
    model.load_state_dict(values)
    model.eval()
    return {name: list(value.shape) for name, value in values.items()}


def as_bytes(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def record_speech_models(target: Path) -> None:
    """Write speech_models.npz: for each case its facts and every hidden state, float32 [layers + 1, T, H].

    They are computed in float64: in float32 torch rounds by the number of its threads.
    """
    classes = {"hubert": transformers.HubertModel, "wav2vec2": transformers.Wav2Vec2Model}
    recorded: dict[str, np.ndarray] = {}
    for number, (name, model_type, changes) in enumerate(speech_models.CASES):
        config = {**speech_models.TINY, **changes}
        model = classes[model_type](classes[model_type].config_class(**config))
        shapes = seeded_model(model)
        facts = {"name": name, "config": {"model_type": model_type, **config}, "shapes": shapes}
        with torch.no_grad():
            sound = torch.tensor(seeded_sound(name, 403))[None].double()
            states = model.double()(sound, output_hidden_states=True).hidden_states
        recorded[f"{number}/facts"] = as_bytes(facts)
        recorded[f"{number}/states"] = torch.cat(states).float().numpy()
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


class Coded(NamedTuple):
    """What transformers makes of a sound.

    Attributes:
        codes: int [levels, T], of all chunks one after the other.
        scales: float32 [chunks], where an EnCodec normalizes.
        sound: of the codes, float32 [channels, samples].
    """

    codes: np.ndarray
    scales: np.ndarray | None
    sound: np.ndarray


def encodec_coded(model: Any, sound: np.ndarray, bandwidth: float) -> Coded:
    """Encode float32 [channels, samples] and decode it again, all channels of an EncodecModel at once."""
    with torch.no_grad():
        found = model.encode(torch.tensor(sound)[None], bandwidth=bandwidth)
        chunks, padding = found.audio_codes[:, 0], found.last_frame_pad_length
        last = chunks[-1][:, : chunks.shape[2] - padding]
        decoded = model.decode(found.audio_codes, found.audio_scales, last_frame_pad_length=padding).audio_values
    scales = torch.cat([scale[0] for scale in found.audio_scales]).numpy() if model.config.normalize else None
    return Coded(torch.cat([*chunks[:-1], last], 1).numpy(), scales, decoded[0].numpy())


def dac_coded(model: Any, sound: np.ndarray, levels: int | None = None) -> Coded:
    """Encode float32 [samples] as the feature extractor pads them, and decode them again."""
    padded = np.pad(sound, (0, -len(sound) % model.config.hop_length))
    with torch.no_grad():
        codes = model.encode(torch.tensor(padded)[None, None], n_quantizers=levels).audio_codes
        return Coded(codes[0].numpy(), None, model.decode(audio_codes=codes).audio_values.numpy())


def tiny_codec(model_type: str, number: int) -> tuple[Any, dict[str, list[int]]]:
    """Return a tiny EnCodec or DAC of transformers with its seeded weights, and their shapes."""
    kind = {"encodec": transformers.EncodecModel, "dac": transformers.DacModel}[model_type]
    _, changes = codec_cases.CASES[model_type][number]
    model = kind(kind.config_class(**{**codec_cases.TINY[model_type], **changes}))
    return model, seeded_model(model, codec_cases.codec_tensor)


def record_encodec_and_dac(target: Path) -> None:
    """Write encodec_dac.npz: for each case the shapes of its weights, and what becomes of a sound."""
    recorded: dict[str, np.ndarray] = {}
    for model_type, cases in codec_cases.CASES.items():
        for number, (name, _) in enumerate(cases):
            model, shapes = tiny_codec(model_type, number)
            sound = codec_cases.case_sound(name, getattr(model.config, "audio_channels", 1))
            coded = encodec_coded(model, sound, 6.0) if model_type == "encodec" else dac_coded(model, sound[0])
            recorded[f"{model_type}/{number}/shapes"] = as_bytes(shapes)
            recorded[f"{model_type}/{number}/codes"] = coded.codes.astype(np.int16)
            recorded[f"{model_type}/{number}/sound"] = coded.sound
            if coded.scales is not None:
                recorded[f"{model_type}/{number}/scales"] = coded.scales
    np.savez_compressed(target / codec_cases.RECORDED.name, **recorded)


def main() -> None:
    TARGET.mkdir(exist_ok=True)
    record_speech_models(TARGET)
    record_mimi(TARGET)
    record_encodec_and_dac(TARGET)
    for path in sorted(TARGET.glob("*.npz")):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

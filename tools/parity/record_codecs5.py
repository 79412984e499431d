#!/usr/bin/env python3
"""Record what transformers 5 computes with tiny codecs that transformers 4 lacks, or computes otherwise.

    .venv-transformers5/bin/python tools/parity/record_codecs5.py

Needs transformers 5, torch and torchaudio (`pip install --no-deps torchaudio`), and neither Paddle nor the package.
Beside a torch without CUDA, torchaudio is imported once the libraries in its folder `lib` are gone; what is used of it
is Python. The weights and sounds are those of tests/codecs/seeded_folders.py, and are not stored.

tests/codecs/recorded/higgs.npz and mimi5.npz hold for each case its facts (`config.json`, names and shapes of the
weights), and for each length of sound the codes, int16 [levels, T], and the sound that they decode to.
resampled.npz has what torchaudio makes of sound at another rate.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchaudio
import transformers
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.codecs import higgs_models, mimi_models  # noqa: E402
from tests.codecs.seeded_folders import seeded_sound, write_folder  # noqa: E402

TARGET = ROOT / "tests/codecs/recorded"
MIMI_CASES = (
    ("a window of five", {"sliding_window": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e3}}),
)

RATES = ((24_000, 16_000, 301), (16_000, 24_000, 200), (24_000, 16_000, 1), (44_100, 16_000, 500), (48_000, 16_000, 90))


def record(
    model: Any, extractor: Any, name: str, config: dict[str, Any], lengths: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Return what is stored of one case; the feature extractor fills sound up as a user's is."""
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        shapes = {name: values.shape for name, values in load_file(Path(place) / "model.safetensors").items()}
        written = write_folder(Path(place) / "seeded", json.loads((Path(place) / "config.json").read_text()), shapes)
        model, info = type(model).from_pretrained(written, output_loading_info=True)
    wrong = {key: value for key, value in info.items() if value}
    if wrong:
        raise SystemExit(f"{name}: {wrong}")
    model.eval()
    facts = {
        "name": name,
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "config": config,
        "shapes": shapes,
        "lengths": lengths,
    }
    recorded = {"facts": np.frombuffer(json.dumps(facts).encode(), np.uint8)}
    for samples in lengths:
        heard = seeded_sound(f"{name} {samples}", samples)
        inputs = extractor(heard, sampling_rate=extractor.sampling_rate, return_tensors="pt")["input_values"]
        with torch.no_grad():
            codes = model.encode(inputs).audio_codes
            sound = model.decode(codes).audio_values
        recorded[f"{samples}/codes"] = codes[0].numpy().astype(np.int16)
        recorded[f"{samples}/sound"] = sound[0, 0].numpy()
    return recorded


def save(file: str, cases: list[dict[str, np.ndarray]]) -> None:
    path = TARGET / file
    np.savez_compressed(path, **{f"{n}/{key}": value for n, case in enumerate(cases) for key, value in case.items()})
    print(f"{path.relative_to(ROOT)}: {len(cases)} cases, {path.stat().st_size:,} bytes")


def main() -> None:
    if int(transformers.__version__.split(".")[0]) < 5:
        sys.exit(f"this is transformers {transformers.__version__}; `make oracle-5` makes an environment with 5")
    cases = []
    for name, changes in higgs_models.CASES:
        config = {"model_type": "higgs_audio_v2_tokenizer", **higgs_models.TINY, **changes}
        values = {key: value for key, value in config.items() if key != "model_type"}
        model = transformers.HiggsAudioV2TokenizerModel(transformers.HiggsAudioV2TokenizerConfig(**values))
        extractor = transformers.DacFeatureExtractor(sampling_rate=24_000, hop_length=model.config.hop_length)
        cases.append(record(model, extractor, name, config, higgs_models.SAMPLES))
    save("higgs.npz", cases)
    cases = []
    for name, changes in MIMI_CASES:
        config = {**mimi_models.TINY, **changes}
        model = transformers.MimiModel(transformers.MimiConfig(**config))
        extractor = transformers.EncodecFeatureExtractor(sampling_rate=config["sampling_rate"])
        cases.append(record(model, extractor, name, {"model_type": "mimi", **config}, (803,)))
    save("mimi5.npz", cases)
    resampled = {}
    for rate, wanted, samples in RATES:
        sound = torch.tensor(seeded_sound(f"{rate} {wanted}", samples))
        resampled[f"{rate} {wanted} {samples}"] = torchaudio.functional.resample(sound, rate, wanted).numpy()
    np.savez_compressed(TARGET / "resampled.npz", **resampled)


if __name__ == "__main__":
    main()

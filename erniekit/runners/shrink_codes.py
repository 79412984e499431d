"""What a run of stage TTS in miniature reads: random codes of a codec of zeros, which the model's layout describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.codecs.residual_kmeans import ResidualKMeans, ResidualKMeansConfig
from erniekit.config import Config
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.speaking import code_layout

RECORDS, CODEC = "codes.jsonl", "codec"
RECORDINGS, MOST_FRAMES, SPEAKERS = 16, 30, 3
WORDS = ("one", "two", "three", "four", "five")


def codes_parameters(config: Config, model: ModelConfig, folder: Path) -> dict[str, Any]:
    """Return what the configuration of a run has instead, to read what `write_codes` writes into `folder`."""
    parameters: dict[str, Any] = {
        "codec": str(folder / CODEC),
        "codec_levels": None,
        "duration_range": [0.0, 1.0],
        "text_frontend": "tokenizer",
        "speech_judge": "",
    }
    layout = code_layout(model)
    if config.speech.audio_codebook_weights:
        parameters["audio_codebook_weights"] = [1.0] * layout.levels
    if config.codes.codebook_size:
        parameters["codebook_size"] = layout.codebook_size
    if config.lora.lora and config.lora.lora_codebooks:
        parameters["lora_codebooks"] = [0]
    if config.speech.tts_objective == "ar_nar":
        parameters |= {"prompt_seconds": [0.05, 0.1], "codebook_sampling": "auto"}
    if config.speech.batch_seconds:
        parameters["batch_seconds"] = 1.0
    return parameters


def write_codes(model: ModelConfig, folder: Path, seed: int) -> None:
    """Write a codec of the model's levels and codes, and recordings in them."""
    layout, random = code_layout(model), np.random.default_rng(seed)
    described = ResidualKMeansConfig(levels=layout.levels, codebook_size=layout.codebook_size)
    mel_bins = described.frames.mel_bins
    codebooks = np.zeros((layout.levels, layout.codebook_size, mel_bins), np.float32)
    codec = ResidualKMeans(described, np.zeros(mel_bins, np.float32), codebooks)
    (folder / CODEC).mkdir(parents=True, exist_ok=True)
    codec.save(folder / CODEC)
    records = []
    for number in range(RECORDINGS):
        frames = int(random.integers(MOST_FRAMES // 2, MOST_FRAMES + 1))
        records.append(
            {
                "id": str(number),
                "text": " ".join(random.choice(WORDS, 3)),
                "speaker": str(number % SPEAKERS),
                "audio_duration": frames / codec.frame_rate,
                "codes": random.integers(0, layout.codebook_size, (layout.levels, frames)).tolist(),
            }
        )
    (folder / RECORDS).write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")

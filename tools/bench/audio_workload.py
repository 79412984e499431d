"""The models and the recordings of the audio benchmark. NumPy and soundfile only: every side of it reads them."""

from __future__ import annotations

import argparse
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

RATE = 16_000
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDS_A_SECOND = 2.5  # of a transcript
BATCH = {"tiny": 16, "small": 4}  # recordings of a training step
SECONDS = {"tiny": (1.4, 0.4, 3.0), "small": (8.0, 0.6, 30.0)}  # of recordings: median, sigma, longest
NEW_TOKENS = 24  # of a transcript

LISTENER = Path(__file__).resolve().parents[2] / "examples/models/tiny-listener"


def config_of(model: str) -> dict[str, Any]:
    """Return that of "tiny", the quickstart's model (1.2 M parameters, windows of 3 s), or of "small" (30 M, 30 s)."""
    config = json.loads((LISTENER / "config.json").read_text())
    if model == "small":
        config["audio_config"] |= {
            "d_model": 384,
            "encoder_layers": 4,
            "encoder_attention_heads": 6,
            "encoder_ffn_dim": 1536,
            "max_source_positions": 1500,
        }
        config["text_config"] |= {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 4096,
        }
        for part in ("audio_config", "text_config"):
            config[part]["initializer_range"] = 0.02
    return dict(config)


def write_folder(model: str, folder: Path) -> None:
    """Copy the tokenizer, the template and the processor's file, with the window of the model; no weights."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((LISTENER / name).read_bytes())
    window = config_of(model)["audio_config"]["max_source_positions"] // 50
    extractor = json.loads((LISTENER / "preprocessor_config.json").read_text())
    extractor |= {"chunk_length": window, "n_samples": window * RATE, "nb_max_frames": window * 100}
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))


def write_recordings(model: str, folder: Path, count: int) -> None:
    """Write `count` recordings of noise, and data.jsonl of their records, whose texts are as long as people speak."""
    import soundfile

    rng = np.random.default_rng(0)
    median, sigma, longest = SECONDS[model]
    lines = []
    for number in range(count):
        seconds = float(np.clip(rng.lognormal(np.log(median), sigma), 0.4, longest))
        sound = rng.normal(0, 0.1, int(seconds * RATE))
        soundfile.write(folder / f"{number}.wav", sound, RATE, subtype="PCM_16")
        text = " ".join(rng.choice(WORDS, max(1, round(seconds * WORDS_A_SECOND))))
        lines.append(json.dumps({"audio_path": f"{number}.wav", "text": text}))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def records(folder: Path) -> list[dict[str, str]]:
    """Return the records, with paths that can be opened."""
    read = [json.loads(line) for line in (folder / "data.jsonl").read_text(encoding="utf-8").splitlines()]
    return [record | {"audio_path": str(folder / record["audio_path"])} for record in read]


def batch_numbers(step: int, batch: int, count: int) -> list[int]:
    """Return which records a step takes: one after the other, and again from the first."""
    return [number % count for number in range(step * batch, (step + 1) * batch)]


def fingerprint(texts: list[str]) -> float:
    """Return a number from 0 to 1 that tells other texts apart."""
    return zlib.crc32("\n".join(texts).encode()) / 2**32


def arguments() -> argparse.Namespace:
    """What every side is started with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="the model and the recordings")
    parser.add_argument("--task", choices=("train", "transcribe"), required=True)
    parser.add_argument("--batch", type=int, required=True, help="recordings of a step")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()

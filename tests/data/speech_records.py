"""Twelve recordings as codes of three speakers, as a JSONL file and as two shards, and how they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.data.conversation import Source
from erniekit.data.dataset import Dataset
from erniekit.data.masked_codes import MaskedCodes
from erniekit.data.media.code_shards import CodedRecording, Shard, write_index, write_shard
from erniekit.data.open_dataset import open_dataset
from erniekit.data.speech_samples import SpeechSettings
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.data.units import CODES

LEVELS, CODEBOOK_SIZE, FRAME_RATE, COUNT = 3, 16, 10.0, 12
SPEAKERS = ("ann", "bob", "cy")


def speech_records() -> list[dict[str, Any]]:
    """Return the records with their codes: C lists of numbers."""
    rng = np.random.default_rng(17)
    records: list[dict[str, Any]] = []
    for number in range(COUNT):
        frames = 6 + number
        record = {
            "id": f"utt-{number}",
            "text": f"count {number} apples",
            "codes": rng.integers(0, CODEBOOK_SIZE, (LEVELS, frames)).tolist(),
            "num_tokens": frames,
            "audio_duration": frames / FRAME_RATE,
            "speaker": SPEAKERS[number % 3],
        }
        further: dict[str, Any] = {"language_id": "en"} if number % 2 else {}
        further |= {"instruct": "female, low"} if number == 4 else {}
        further |= {"text_pinyin": "yi er"} if number == 5 else {}
        further |= {"clean_start_token_idx": 3} if number == 6 else {}
        records.append(record | further)
    return records


def write_codes_jsonl(path: Path, records: list[dict[str, Any]] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    records = speech_records() if records is None else records
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_code_shards(folder: Path, records: list[dict[str, Any]] | None = None, shards: int = 2) -> Path:
    """Write shards as `erniekit codes` does; return their folder."""
    records = speech_records() if records is None else records
    written = []
    for number in range(shards):
        files = Shard(folder / "audios" / f"s{number}.tar", folder / "txts" / f"s{number}.jsonl")
        for file in (files.tar, files.records):
            file.parent.mkdir(parents=True, exist_ok=True)
        own = records[number * len(records) // shards : (number + 1) * len(records) // shards]
        samples = [
            CodedRecording(
                record["id"], np.array(record["codes"]), {name: record[name] for name in record if name != "codes"}
            )
            for record in own
        ]
        written.append(write_shard(files, samples, CODEBOOK_SIZE))
    write_index(folder / "data.lst", written)
    return folder


def speech_settings(**changes: Any) -> SpeechSettings:
    return SpeechSettings(LEVELS, CODEBOOK_SIZE, FRAME_RATE, **{"frontend": "tokenizer", **changes})


def masked_codes(tokenizer: Tokenizer, **changes: Any) -> MaskedCodes:
    """Return draws of masked codes, whose marks are texts that every tokenizer has."""
    pieces = ("<d>", "<l>", "</l>", "<i>", "</i>", "<t>", "</t>", "None")
    values: dict[str, Any] = {
        "levels": LEVELS, "codebook_size": CODEBOOK_SIZE, "mask_id": CODEBOOK_SIZE, "frame_rate": FRAME_RATE,
        "seed": 3, "mask_ratio": (0.0, 1.0), "prompt_ratio": (0.0, 0.3), "condition_dropout": 0.1, "language": 0.8,
        "instruct": 1.0, "only_instruct": 0.5, "pinyin": 0.3,
        "tokens": tuple(tuple(tokenizer.encode(piece)) for piece in pieces), "max_seq_len": 200,
    }  # fmt: skip
    return MaskedCodes(**{**values, **changes})


def open_speech(path: Path, tokenizer: Tokenizer, cache: Path, **changes: Any) -> Dataset:
    """Open records as codes, with draws of masked codes."""
    options: dict[str, Any] = {
        "max_seq_len": 200, "drawing": masked_codes(tokenizer), "speech": speech_settings(), **changes
    }  # fmt: skip
    return open_dataset([Source(path, CODES)], tokenizer, None, cache_dir=cache, **options)

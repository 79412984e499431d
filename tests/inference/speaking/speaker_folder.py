"""Tiny models that speak, with random weights: the tokenizer of the quickstart's model and a codec of two levels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from erniekit.codecs.residual_kmeans import ResidualKMeans, ResidualKMeansConfig
from erniekit.codecs.spectrogram import MelFrames
from erniekit.model.architectures.speaking import control_tokens
from tests.tiny_runs import save_random_model

TINY_ERNIE = Path(__file__).parents[3] / "examples/models/tiny-ernie"
LEVELS, CODES = 2, 8
FRAMES = MelFrames(8000, 256, 128, 8, 40.0, 4000.0)  # 62.5 frames a second
LLM: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 4096, "initializer_range": 0.3,
    "tie_word_embeddings": True, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


def codec_folder(folder: Path, levels: int = LEVELS, codes: int = CODES) -> Path:
    """Write a codec whose codes are noise of different colours."""
    rng = np.random.default_rng(7)
    config = ResidualKMeansConfig(FRAMES, levels=levels, codebook_size=codes, griffin_lim_rounds=2)
    centroids = rng.standard_normal((levels, codes, FRAMES.mel_bins)).astype(np.float32)
    folder.mkdir(parents=True)
    ResidualKMeans(config, np.full(FRAMES.mel_bins, 1.0, np.float32), centroids).save(folder)
    return folder


def speaker_folder(folder: Path, kind: str = "omnivoice", seed: int = 3) -> Path:
    """Write a model folder with its codec in `audio_tokenizer`."""
    source, model = folder / "shape", folder / "model"
    source.mkdir(parents=True)
    model.mkdir()
    tokenizer = Tokenizer.from_file(str(TINY_ERNIE / "tokenizer.json"))
    tokenizer.add_special_tokens(list(control_tokens(kind, LEVELS)))
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_bytes((TINY_ERNIE / "tokenizer_config.json").read_bytes())
    llm = {**LLM, "model_type": "qwen3", "vocab_size": tokenizer.get_vocab_size()}
    size = (
        {"audio_vocab_size": CODES + 1, "audio_mask_id": CODES} if kind == "omnivoice" else {"audio_vocab_size": CODES}
    )
    config = {"model_type": kind, "num_audio_codebook": LEVELS, **size, "llm_config": llm}
    (source / "config.json").write_text(json.dumps(config))
    save_random_model(source, model, seed=seed)
    codec_folder(model / "audio_tokenizer")
    return model

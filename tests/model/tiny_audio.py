"""Tiny models that listen, and batches for them whose spectrograms are noise."""

from __future__ import annotations

from typing import Any

import numpy as np

from erniekit.data.batch import Batch
from erniekit.data.collate import collate
from erniekit.data.templates.ernie import Sample
from erniekit.model.architectures.model_config import ModelConfig

TEXT = {
    "vocab_size": 56, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3, "tie_word_embeddings": False,
}  # fmt: skip
VOXTRAL = {
    "model_type": "voxtral",
    "audio_token_id": 24,
    "text_config": {"model_type": "llama", "head_dim": 4, **TEXT},
    "audio_config": {
        "model_type": "voxtral_encoder", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_mel_bins": 4, "max_source_positions": 6,
    },
}  # fmt: skip
QWEN2_AUDIO = {
    "model_type": "qwen2_audio",
    "audio_token_index": 24,
    "text_config": {"model_type": "qwen2", **TEXT},
    "audio_config": {
        "model_type": "qwen2_audio_encoder", "d_model": 8, "encoder_ffn_dim": 16, "encoder_layers": 2,
        "encoder_attention_heads": 2, "num_mel_bins": 4, "max_source_positions": 6,
    },
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {"voxtral": VOXTRAL, "qwen2_audio": QWEN2_AUDIO}
LENGTH = 12  # of a row


def audio_config(family: str) -> ModelConfig:
    return ModelConfig.from_json(FAMILIES[family])


def audio_batch(config: ModelConfig, windows: int, seed: object, *, length: int = LENGTH) -> Batch:
    """Two rows of one document; so many windows of noise in the first one, each at its placeholders."""
    assert config.architecture.audio is not None
    inputs = config.architecture.audio(config)
    random = np.random.default_rng(seed)  # type: ignore[arg-type]
    rows = random.integers(25, 56, (2, length + 1))
    states, frames = np.full((2, length), -1, np.int64), []
    place = 1
    for window in range(windows):
        frames.append(int(random.integers(inputs.window_frames - 3, inputs.window_frames + 1)))
        count = inputs.tokens_of(frames[-1])
        rows[0, place : place + count] = inputs.placeholder_id
        states[0, place : place + count] = window * inputs.window_tokens + np.arange(count)
        place += count
    samples = [Sample(ids[:-1].astype(np.int32), ids[1:].astype(np.int32)) for ids in rows]
    batch = collate([[sample] for sample in samples], [[0], [1]], 0)
    labels = np.where(batch.labels == inputs.placeholder_id, -100, batch.labels)
    shape = (windows, inputs.mel_bins, inputs.window_frames)
    return batch.with_arrays(
        labels=labels,
        audio_features=random.standard_normal(shape).astype(np.float32),
        audio_frames=np.array(frames, np.int32),
        audio_states=states,
    )

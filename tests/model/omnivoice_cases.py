"""Models and documents with which the package omnivoice is compared. Imports nothing of the package under test.

A document is a text and T frames of C levels; some codes are masked, and these are what is predicted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.model.seeded_weights import seeded_ids

RECORDED = Path(__file__).parent / "recorded/omnivoice.npz"
LEVELS, MASK = 4, 16  # a mask stands behind 16 codes
WEIGHTS = [8, 6, 4, 2]
SEED = 11
LLM: dict[str, Any] = {
    "vocab_size": 56,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
}
BASES: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True, **LLM},
    "llama": {"model_type": "llama", "tie_word_embeddings": False, **LLM},
}
SIZES = ((5, 9), (4, 12), (6, 7))  # tokens of the text, and frames, of each document


class Document(NamedTuple):
    """ids int64[n]; codes and labels int64[C, T], with MASK where a code is masked and -100 where it is not."""

    ids: np.ndarray
    codes: np.ndarray
    labels: np.ndarray


def outer_values() -> dict[str, Any]:
    """The keys of config.json around those of the decoder."""
    return {
        "audio_vocab_size": MASK + 1,
        "audio_mask_id": MASK,
        "num_audio_codebook": LEVELS,
        "audio_codebook_weights": WEIGHTS,
    }


def documents(*, last_level: bool = True) -> list[Document]:
    """The documents; without `last_level` no code of the last level is masked."""
    found = []
    for number, (tokens, frames) in enumerate(SIZES):
        codes = seeded_ids(f"codes {number}", LEVELS * frames, MASK, SEED).reshape(LEVELS, frames)
        masked = seeded_ids(f"masked {number}", LEVELS * frames, 10, SEED).reshape(LEVELS, frames) < 6
        masked[:, :2] = False  # a clean beginning
        masked[-1] &= last_level
        ids = seeded_ids(f"ids {number}", tokens, LLM["vocab_size"], SEED)
        found.append(Document(ids, np.where(masked, MASK, codes), np.where(masked, codes, -100)))
    return found

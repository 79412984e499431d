"""Recordings as codes, from which shards are written by us and by others. Imports nothing of the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

RECORDED = Path(__file__).parent / "recorded_shards"  # what the `omnivoice` package writes, and what it reads of ours
CODEBOOK_SIZE, LEVELS, FRAME_RATE = 1024, 8, 25
KEYS = ("utt-1", "sprache_ä", "speaker%2F7")


def cases() -> list[tuple[str, np.ndarray, dict[str, Any]]]:
    """Return the key, the codes int32[8, frames] and the record of each recording."""
    found = []
    for number, key in enumerate(KEYS):
        codes = np.random.default_rng(number).integers(0, CODEBOOK_SIZE, (LEVELS, 5 + 3 * number), np.int32)
        frames = codes.shape[1]
        record = {"id": key, "text": f"Satz {number} – ü", "language_id": "de", "num_tokens": frames}
        found.append((key, codes, record | {"audio_duration": frames / FRAME_RATE}))
    return found

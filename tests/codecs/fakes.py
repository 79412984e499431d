"""A codec for tests: a code is the loudness of a frame. Processes can open it, too."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from erniekit.errors import DataError

FRAME = 160


@dataclass
class LoudnessCodec:
    """Two levels of 16 codes, 100 frames a second."""

    sampling_rate: int = 16_000
    frame_rate: float = 100.0
    levels: int = 2
    codebook_size: int = 16
    can_decode: bool = True
    fingerprint: str = "loudness"

    def encode(self, sound: np.ndarray) -> np.ndarray:
        if len(sound) == 13 * FRAME:
            raise DataError("the codec cannot take 13 frames")
        if len(sound) == 17 * FRAME:
            os._exit(9)  # as if the system had killed this process
        frames = sound[: len(sound) // FRAME * FRAME].reshape(-1, FRAME)
        loud = (
            np.minimum(np.abs(frames).max(axis=1) * 16, 15).astype(np.int32) if len(frames) else np.zeros(0, np.int32)
        )
        return np.stack([loud, 15 - loud][: self.levels])

    def decode(self, codes: np.ndarray) -> np.ndarray:
        return np.repeat(codes[0] / 16, FRAME).astype(np.float32)


def open_loudness(levels: int | None = None) -> LoudnessCodec:
    return LoudnessCodec(levels=levels or 2, fingerprint=f"loudness {levels or 2}")

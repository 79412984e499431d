"""Sounds for tests, and files that hold them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile

RATE = 16_000


def tone(seconds: float, rate: int = RATE, hertz: float = 440.0) -> np.ndarray:
    """float32[seconds * rate], half as loud as can be."""
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def noise(samples: int, channels: int = 1, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).normal(0, 0.1, (samples, channels)).astype(np.float32)
    return drawn[:, 0] if channels == 1 else drawn


def write(path: Path, sound: np.ndarray, rate: int = RATE, **options: str) -> str:
    soundfile.write(path, sound, rate, **options)
    return str(path)

"""What every codec refuses: sound that cannot be encoded, codes that are none of its own, and levels that it lacks."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from erniekit.codecs.codec import Codec
from erniekit.errors import ConfigurationError, DataError


def check_sound(sound: np.ndarray) -> np.ndarray:
    """Return sound as float32[samples].

    Raises:
        DataError: it has several channels, or samples that are NaN or infinite.
    """
    sound = np.asarray(sound)
    if sound.ndim != 1 or sound.dtype.kind != "f":
        raise DataError(f"sound to be encoded is float32[samples] of one channel; got {_described(sound)}")
    bad = sound.size - int(np.isfinite(sound).sum())
    if bad:
        raise DataError(f"{bad:,} of {sound.size:,} samples are NaN or infinite")
    return np.ascontiguousarray(sound, np.float32)


def check_recording(sound: np.ndarray) -> np.ndarray:
    """Return sound as `check_sound` does, for codecs to which no samples are no frame.

    Raises:
        DataError: as `check_sound`, or there are no samples.
    """
    sound = check_sound(sound)
    if not len(sound):
        raise DataError("a recording without samples has no codes")
    return sound


def check_codes(codes: np.ndarray, codec: Codec) -> np.ndarray:
    """Return codes as int64[levels, frames], of as many levels as the codec has, or of fewer (from the coarsest).

    Raises:
        DataError: they are no integers, have another shape, or one is out of range.
    """
    codes = np.asarray(codes)
    if codes.ndim != 2 or codes.dtype.kind not in "iu" or not 1 <= codes.shape[0] <= codec.levels:
        raise DataError(
            f"codes to be decoded are integers [1 to {codec.levels} levels, frames]; got {_described(codes)}"
        )
    outside = np.argwhere((codes < 0) | (codes >= codec.codebook_size))
    if len(outside):
        level, frame = (int(index) for index in outside[0])
        raise DataError(
            f"code {codes[level, frame]} of level {level}, frame {frame} is out of range: this codec has "
            f"{codec.codebook_size} codes for each level, from 0"
        )
    return codes.astype(np.int64)


def check_levels(levels: int | None, available: int, folder: Path) -> int:
    """Return how many levels of a codec are used; None asks for all.

    Raises:
        ConfigurationError: the codec has fewer.
    """
    if levels is not None and not 1 <= levels <= available:
        raise ConfigurationError(f"{levels} levels: {folder} has {available}; choose from 1 to that")
    return available if levels is None else levels


def _described(values: np.ndarray) -> str:
    return f"{values.dtype}{list(values.shape)}"

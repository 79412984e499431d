"""Keep a uniform sample of the frames of a stream, in bounded memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

import numpy as np

from erniekit.errors import DataError

logger = logging.getLogger(__name__)


class FrameSample:
    """A sample of at most `capacity` frames, each frame of the stream being as likely as any other.

    Each frame draws a number, and those with the smallest numbers are kept. So the sample depends on the seed and on
    the frames in their order, and not on how they were grouped.
    """

    def __init__(self, capacity: int, seed: int = 0) -> None:
        self.capacity = capacity
        self.seen = 0
        self._rng = np.random.default_rng(seed)
        self._kept: list[np.ndarray] = []
        self._numbers: list[np.ndarray] = []
        self._waiting = 0

    def add(self, frames: np.ndarray) -> None:
        """Take frames, float32[n, D]."""
        numbers = self._rng.random(len(frames))
        self.seen += len(frames)
        self._kept.append(frames)
        self._numbers.append(numbers)
        self._waiting += len(frames)
        if self._waiting > 2 * self.capacity:
            self._select()

    def frames(self) -> np.ndarray:
        """Return the sample, float32[at most capacity, D], in the order of the stream."""
        if not self._kept:
            return np.zeros((0, 0), np.float32)
        self._select()
        return self._kept[0]

    def _select(self) -> None:
        frames, numbers = np.concatenate(self._kept), np.concatenate(self._numbers)
        if len(frames) > self.capacity:
            chosen = np.sort(np.argpartition(numbers, self.capacity)[: self.capacity])
            frames, numbers = frames[chosen], numbers[chosen]
        self._kept, self._numbers, self._waiting = [frames], [numbers], len(frames)


def sample_frames(
    sounds: Iterable[np.ndarray],
    frames_of: Callable[[np.ndarray], np.ndarray],
    *,
    sampling_rate: int,
    codes: int = 1,
    max_frames: int,
    max_seconds: float | None = None,
    shortest: int = 1,
    seed: int = 0,
) -> np.ndarray:
    """Sample the frames of recordings, of which one at a time is in memory.

    Args:
        sounds: float32[samples] each, at `sampling_rate`.
        frames_of: the frames of a recording, float32[T, D].
        codes: that are fitted on the frames; it is told if there are fewer frames.
        max_frames: that are kept.
        max_seconds: of sound that are read; None: all. The recording that goes beyond is cut.
        shortest: samples of a recording; shorter ones are left out.

    Returns:
        float32[at most max_frames, D].

    Raises:
        DataError: there are no recordings.
    """
    sample, left = FrameSample(max_frames, seed), math.inf if max_seconds is None else max_seconds * sampling_rate
    for sound in sounds:
        if len(sound) > left:
            sound = sound[: int(left)]
        if len(sound) >= shortest:
            sample.add(frames_of(sound))
        left -= len(sound)
        if left < shortest:
            break
    if not sample.seen:
        raise DataError(f"there is no sound to fit codes on: expected a recording of at least {shortest} samples")
    frames = sample.frames()
    if len(frames) < codes:
        logger.warning(
            f"a codebook of {codes:,} codes is fitted on {len(frames):,} frames, so some of its codes are never used; "
            "a smaller codebook_size, or more sound, gives each a use"
        )
    return frames

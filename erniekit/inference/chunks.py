"""Cut recordings of any length into chunks that a model listens to, at quiet places and without a gap."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from erniekit.data.media.clip import Clip
from erniekit.data.media.recording import clip_length, read_clip
from erniekit.data.media.recording_check import SILENCE

STRETCH_SECONDS = 1800  # of sound in memory at once: 115 MB at 16,000 samples a second
QUIET_SECONDS = 0.2  # the length of the places whose loudness is compared
SEARCHED = 0.2  # the last part of a chunk, in which the quietest place is looked for
SHORTEST_SECONDS = 1.0  # of what is left behind the last cut, where there is a choice
STEP_SECONDS = 0.01


class Chunk(NamedTuple):
    """A part of a recording: where it is, and its sound, float32[n] at the sampling rate that was asked for."""

    clip: Clip
    sound: np.ndarray

    @property
    def is_silent(self) -> bool:
        """Whether nothing in it is louder than -80 dB of full scale, as between the parts of a recording."""
        return not len(self.sound) or float(np.abs(self.sound).max()) <= SILENCE


def read_chunks(path: Path, longest: int, sampling_rate: int) -> Iterator[Chunk]:
    """Yield the chunks of a recording in their order; together they are the whole of it.

    At most `STRETCH_SECONDS` of sound are in memory.

    Args:
        longest: samples of a chunk, at least one.

    Raises:
        RecordingError: the recording cannot be read; some chunks may have been yielded before.
        DataError: a package is missing.
    """
    name = str(path.absolute())
    total = clip_length(Clip(name), sampling_rate)
    stretch = max(STRETCH_SECONDS * sampling_rate, 3 * longest)
    start = 0
    while start < total:
        last = start + stretch >= total
        end = None if last else (start + stretch) / sampling_rate
        sound = read_clip(Clip(name, start / sampling_rate, end), sampling_rate)
        borders = chunk_borders(sound, longest, sampling_rate)
        if not last:
            del borders[-1]  # more may follow the sound behind it
        for first, stop in pairwise(borders):
            clip = Clip(name, (start + first) / sampling_rate, (start + stop) / sampling_rate)
            yield Chunk(clip, sound[first:stop])
        if last:
            return
        start += borders[-1]


def chunk_borders(sound: np.ndarray, longest: int, sampling_rate: int) -> list[int]:
    """Return where chunks of at most `longest` samples begin and end: 0, every cut, and the number of samples.

    A chunk ends at the quietest 0.2 seconds of its last fifth, or of its last half where the rest is shorter than two
    chunks, so that a cut falls between words where there is a pause.

    Args:
        sound: float32[n].
    """
    step = max(1, round(STEP_SECONDS * sampling_rate))
    energies = _energies(sound, step, round(QUIET_SECONDS / STEP_SECONDS))
    borders = [0]
    while (rest := len(sound) - borders[-1]) > longest:
        low = max(1, min(int((1 - SEARCHED) * longest), rest // 2))
        shortest = min(round(SHORTEST_SECONDS * sampling_rate), longest // 2)
        high = max(low, min(longest, rest - shortest))
        borders.append(_quietest(energies, borders[-1] + low, borders[-1] + high, step))
    return [*borders, len(sound)] if len(sound) else borders


def _energies(sound: np.ndarray, step: int, width: int) -> np.ndarray:
    """Return the energy of the `width` steps around the beginning of each step; float64."""
    whole = np.pad(sound, (0, -len(sound) % step)).reshape(-1, step)
    sums = np.pad(np.einsum("fs,fs->f", whole, whole, dtype=np.float64), (width // 2, width - width // 2))
    total = np.pad(np.cumsum(sums), (1, 0))
    return total[width:] - total[:-width]


def _quietest(energies: np.ndarray, low: int, high: int, step: int) -> int:
    """Return the place of the quietest step from sample `low` to `high`, the last one of several; `high` if none
    begins there."""
    first, last = -(-low // step), high // step
    around = energies[first : last + 1]
    if first < 1 or not len(around):
        return high
    return (last - int(around[::-1].argmin())) * step if len(around) == last + 1 - first else high

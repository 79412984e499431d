"""Short-time spectra of sound, log-mel frames of them, and sound of spectra, in NumPy.

These frames are made to be turned back into sound: magnitudes and not powers, windows that overlap enough to be added
up again, and no limit that depends on the loudest part of a recording, so that a frame depends only on the sound under
its window. What Whisper's encoder hears is another spectrogram (`data/media/log_mel.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

# Frames that are transformed at once: the product with the mel filters is so small that OpenBLAS computes it in one
# thread, so the values do not depend on the number of threads.
BLOCK_FRAMES = 12
MAX_MEL_BINS = 512  # speech has 20 to 128; the matrix of the filters grows with them
_BLOCKS_AT_ONCE = 32  # whose spectra are computed together
_SOLVED_AT_ONCE = 512  # frames whose magnitudes are found together, in the cache of a core


@dataclass(frozen=True)
class MelFrames:
    """How sound is cut into frames and described by mel bands.

    Attributes:
        sampling_rate: of the sound, in Hz.
        n_fft: samples under the periodic Hann window of one frame.
        hop_length: samples from one frame to the next.
        mel_bins: triangular filters, equally wide on the mel scale.
        lowest_frequency, highest_frequency: where the first filter begins and the last one ends, in Hz.
        mel_floor: the least magnitude of a band; what is below it counts as silence. A full-scale sine has n_fft / 4.
    """

    sampling_rate: int = 16_000
    n_fft: int = 512
    hop_length: int = 160
    mel_bins: int = 80
    lowest_frequency: float = 40.0
    highest_frequency: float = 8000.0
    mel_floor: float = 0.003

    @property
    def frame_rate(self) -> float:
        return self.sampling_rate / self.hop_length

    def count(self, samples: int) -> int:
        """Return the frames of so many samples: one for each begun hop, and at least one."""
        return max(1, -(-samples // self.hop_length))

    def problem(self) -> str:
        """Return what makes these values unusable; "" if nothing does."""
        if not 2 <= self.hop_length <= self.n_fft // 2:
            return f"hop_length is {self.hop_length}: expected 2 to n_fft / 2 = {self.n_fft // 2}"
        if self.n_fft % 2 or self.n_fft > 1 << 16:
            return f"n_fft is {self.n_fft}: expected an even number up to 65,536"
        most = min(self.n_fft // 2, MAX_MEL_BINS)
        if not 1 <= self.mel_bins <= most:
            return f"mel_bins is {self.mel_bins}: expected 1 to {most}, at most n_fft / 2 and {MAX_MEL_BINS}"
        if not 0 <= self.lowest_frequency < self.highest_frequency <= self.sampling_rate / 2:
            return (
                f"the mel bands reach from {self.lowest_frequency:g} to {self.highest_frequency:g} Hz: expected to lie "
                f"between 0 and half the sampling rate, {self.sampling_rate / 2:g} Hz"
            )
        if not (self.mel_floor > 0 and math.isfinite(self.mel_floor)):
            return f"mel_floor is {self.mel_floor}: expected a number above 0"
        return ""


def log_mel_frames(sound: np.ndarray, frames: MelFrames) -> np.ndarray:
    """Return the natural logarithm of the magnitude in each mel band.

    Args:
        sound: float32[samples], at least one.

    Returns:
        float32[T, mel_bins], T = frames.count(samples). The middle of frame t is the middle of its hop; around the
        sound is silence.
    """
    views = _windows_of(sound, frames)
    window, filters = _window(frames.n_fft), mel_filters(frames).T
    found = np.empty((len(views), frames.mel_bins), np.float32)
    together = BLOCK_FRAMES * _BLOCKS_AT_ONCE
    for start in range(0, len(views), together):
        magnitudes = np.abs(np.fft.rfft(views[start : start + together] * window)).astype(np.float32)
        for first in range(0, len(magnitudes), BLOCK_FRAMES):
            found[start + first : start + first + BLOCK_FRAMES] = magnitudes[first : first + BLOCK_FRAMES] @ filters
    np.maximum(found, np.float32(frames.mel_floor), out=found)
    return np.log(found, out=found)


def magnitudes_of(log_mel: np.ndarray, frames: MelFrames, rounds: int = 30) -> np.ndarray:
    """Return magnitudes whose mel bands are nearly those given, float32[T, n_fft / 2 + 1].

    They are the non-negative least squares solution as far as multiplicative updates (Lee and Seung 2001, NIPS 13) have
    come after some rounds; the first guess spreads each band over its frequencies.
    """
    filters, tiny = mel_filters(frames), np.float32(1e-9)
    spread = filters.sum(axis=0) * filters.sum(axis=1).mean() + tiny
    magnitudes = np.empty((len(log_mel), filters.shape[1]), np.float32)
    for start in range(0, len(log_mel), _SOLVED_AT_ONCE):
        pull = np.exp(log_mel[start : start + _SOLVED_AT_ONCE].astype(np.float32)) @ filters
        found = pull / spread
        for _ in range(rounds):
            found *= pull / ((found @ filters.T) @ filters + tiny)
        magnitudes[start : start + _SOLVED_AT_ONCE] = found
    return magnitudes


def spectra_of(sound: np.ndarray, frames: MelFrames) -> np.ndarray:
    """Return the short-time Fourier transform, complex128[T, n_fft / 2 + 1], with T as in `log_mel_frames`."""
    return np.fft.rfft(_windows_of(sound, frames) * _window(frames.n_fft))


def sound_of(spectra: np.ndarray, frames: MelFrames) -> np.ndarray:
    """Return the sound whose transform is nearest to the given one, float64[T * hop_length].

    It is the least squares solution of Griffin and Lim 1984 (https://doi.org/10.1109/TASSP.1984.1164317): windowed
    inverse transforms, added up and divided by the sum of squared windows.
    """
    window = _window(frames.n_fft)
    pieces = np.fft.irfft(spectra, frames.n_fft) * window
    count, margin = len(pieces), _margin(frames)
    total = _added_up(pieces, frames.hop_length)
    weight = _added_up(np.broadcast_to(window**2, (count, frames.n_fft)), frames.hop_length)
    heard = slice(margin, margin + count * frames.hop_length)
    return total[heard] / np.maximum(weight[heard], 1e-8)


@cache
def mel_filters(frames: MelFrames) -> np.ndarray:
    """Return triangular filters of height 1 for magnitudes, float32[mel_bins, n_fft / 2 + 1].

    The mel scale is O'Shaughnessy's: 2595 log10(1 + f / 700). A filter between two frequencies of the transform takes
    the nearer one, so that no band is always silent.
    """
    lowest, highest = (
        2595.0 * math.log10(1.0 + hertz / 700.0) for hertz in (frames.lowest_frequency, frames.highest_frequency)
    )
    corners = 700.0 * (10.0 ** (np.linspace(lowest, highest, frames.mel_bins + 2) / 2595.0) - 1.0)
    lower, centre, upper = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    frequencies = np.linspace(0.0, frames.sampling_rate / 2, frames.n_fft // 2 + 1)
    rising, falling = (frequencies - lower) / (centre - lower), (upper - frequencies) / (upper - centre)
    filters = np.maximum(0.0, np.minimum(rising, falling))
    for row in np.flatnonzero(~filters.any(axis=1)):
        filters[row, np.abs(frequencies - centre[row]).argmin()] = 1.0
    filters = filters.astype(np.float32)
    filters.setflags(write=False)
    return filters


def _margin(frames: MelFrames) -> int:
    """Return the samples of the first window that lie before the sound."""
    return (frames.n_fft - frames.hop_length) // 2


def _windows_of(sound: np.ndarray, frames: MelFrames) -> np.ndarray:
    """Return the samples under each window, float32[T, n_fft], a view."""
    count, margin = frames.count(len(sound)), _margin(frames)
    spread = np.zeros((count - 1) * frames.hop_length + frames.n_fft, np.float32)
    spread[margin : margin + len(sound)] = sound[: len(spread) - margin]
    return sliding_window_view(spread, frames.n_fft)[:: frames.hop_length]


def _added_up(pieces: np.ndarray, hop: int) -> np.ndarray:
    """Add up pieces [T, n] of which each begins `hop` samples after the one before."""
    count, length = pieces.shape
    slots = -(-length // hop)
    total = np.zeros((count + slots, hop))
    for slot in range(slots):
        part = pieces[:, slot * hop : (slot + 1) * hop]
        total[slot : slot + count, : part.shape[1]] += part
    return total.reshape(-1)


@cache
def _window(length: int) -> np.ndarray:
    """Return the periodic Hann window, float64."""
    return 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(length) / length)

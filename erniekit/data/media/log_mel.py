"""Whisper's log-mel spectrogram, in NumPy.

The definition is that of Radford et al. 2022 (https://arxiv.org/abs/2212.04356) in the code that came with it, and of
`transformers.WhisperFeatureExtractor`: power spectrum of a periodic Hann window, mel filters of Slaney's Auditory
Toolbox with equal area, log10, at most 8 decades below the loudest value of the recording, (x + 4) / 4.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

N_FFT = 400
FLOOR = 1e-10
DECADES = 8.0
# Frames that are transformed at once: their spectra stay in the cache of a core, and the products are so small that
# OpenBLAS computes each in one thread. So the values do not depend on the number of threads.
BLOCK_FRAMES = 64
BAND_FILTERS = 32  # multiplied at once, with the frequencies that they let through
# Slaney's mel scale: linear below 1,000 Hz, logarithmic above.
_HZ_PER_MEL, _BREAK_HZ, _LOG_STEP = 200.0 / 3, 1000.0, np.log(6.4) / 27


def log_mel(
    sound: np.ndarray, mel_bins: int, frames: int, *, hop: int = 160, sampling_rate: int = 16_000
) -> np.ndarray:
    """Return the log-mel spectrogram of a recording that is followed by silence.

    Frames of that silence alone are not transformed: their value is known.

    Args:
        sound: float32[n], 1 <= n <= frames * hop.
        mel_bins: the number of mel filters M, from 0 Hz to half the sampling rate.
        frames: the number of frames T, of the recording with its silence; frames * hop > N_FFT / 2.

    Returns:
        float32[M, T]. The middle of frame t is sample t * hop; before the beginning and behind frames * hop the sound
        is mirrored.

    Raises:
        ValueError: the sound is longer than the frames, empty, or they are too few.
    """
    half, total = N_FFT // 2, frames * hop
    if not 0 < len(sound) <= total or total <= half:
        raise ValueError(f"{len(sound)} samples in {frames} frames: expected 1 to {total}, and more than {half}")
    heard = min(frames, -(-(len(sound) + half) // hop))  # frames that begin before the sound ends
    spread = np.zeros(max((heard - 1) * hop, 1) + N_FFT, np.float32)  # sample 0 of the sound is at `half`
    spread[half : half + len(sound)] = sound
    spread[:half] = spread[2 * half : half : -1]
    behind = len(spread) - half - total
    if behind > 0:  # the last frames reach behind the end
        last = half + total - 2
        spread[-behind:] = spread[last : last - behind : -1]
    views = sliding_window_view(spread, N_FFT)[::hop][:heard]
    bands, window = _bands(mel_bins, sampling_rate), _window()
    found = np.empty((mel_bins, frames), np.float32)
    for start in range(0, heard, BLOCK_FRAMES):
        spectrum = np.fft.rfft(views[start : start + BLOCK_FRAMES] * window)  # in float64, as the window is
        power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32)
        for rows, columns, weights in bands:
            found[rows, start : start + len(power)] = weights @ power[:, columns].T
    mel = found[:, :heard]
    np.log10(np.maximum(mel, FLOOR, out=mel), out=mel)
    lowest = max(float(np.log10(FLOOR)), float(mel.max()) - DECADES)
    found[:, heard:] = lowest
    np.maximum(mel, lowest, out=mel)
    found += 4.0
    found /= 4.0
    return found


@cache
def mel_filters(mel_bins: int, sampling_rate: int = 16_000) -> np.ndarray:
    """Return triangular filters for the power spectrum, float32[mel_bins, N_FFT / 2 + 1]; each has the area 1 (Hz)."""
    top = float(_mel(np.array(sampling_rate / 2)))
    corners = _hertz(np.linspace(0.0, top, mel_bins + 2))
    lower, centre, upper = (corners[:-2, None], corners[1:-1, None], corners[2:, None])
    frequencies = np.linspace(0.0, sampling_rate / 2, N_FFT // 2 + 1)
    rising, falling = (frequencies - lower) / (centre - lower), (upper - frequencies) / (upper - centre)
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    filters = (triangles * 2.0 / (upper - lower)).astype(np.float32)
    filters.setflags(write=False)
    return filters


@cache
def _bands(mel_bins: int, sampling_rate: int) -> list[tuple[slice, slice, np.ndarray]]:
    """Return neighbouring filters, the frequencies at which any of them is above 0, and their weights there."""
    filters = mel_filters(mel_bins, sampling_rate)
    bands = []
    for start in range(0, mel_bins, BAND_FILTERS):
        rows = slice(start, start + BAND_FILTERS)
        heard = np.flatnonzero(filters[rows].any(axis=0))
        columns = slice(int(heard[0]), int(heard[-1]) + 1) if len(heard) else slice(0, 1)
        bands.append((rows, columns, np.ascontiguousarray(filters[rows, columns])))
    return bands


def _mel(hertz: np.ndarray) -> np.ndarray:
    logarithmic = _BREAK_HZ / _HZ_PER_MEL + np.log(np.maximum(hertz, 1.0) / _BREAK_HZ) / _LOG_STEP
    return np.where(hertz < _BREAK_HZ, hertz / _HZ_PER_MEL, logarithmic)


def _hertz(mel: np.ndarray) -> np.ndarray:
    edge = _BREAK_HZ / _HZ_PER_MEL
    return np.where(mel < edge, mel * _HZ_PER_MEL, _BREAK_HZ * np.exp(_LOG_STEP * (mel - edge)))


@cache
def _window() -> np.ndarray:
    """Return the periodic Hann window."""
    return 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(N_FFT) / N_FFT)

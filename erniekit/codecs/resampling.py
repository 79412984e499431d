"""Change the rate of sound by a windowed sinc filter, as codecs were trained behind it."""

from __future__ import annotations

import math

import numpy as np

ZEROS, ROLLOFF = 6, 0.99  # zero crossings on either side; share of the lower Nyquist frequency that passes


def resample(sound: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Return ceil(samples * wanted / rate) samples, float32, as `torchaudio.functional.resample` does by default.

    Sample j of the result is sum_i x[i] h(j / wanted - i / rate), where h is a sinc at ROLLOFF times the lower Nyquist
    frequency under a Hann window of ZEROS crossings (https://ccrma.stanford.edu/~jos/resample/). Recordings are read
    with a better filter; this one is for codecs whose encoder has learned from sound behind it.

    Args:
        sound: float32[samples].
        rate, wanted: in Hz.
    """
    if rate == wanted:
        return sound
    divisor = math.gcd(rate, wanted)
    step, phases = rate // divisor, wanted // divisor  # `phases` samples come of every `step`
    kernels, width = _kernels(step, phases)
    padded = np.concatenate([np.zeros(width, np.float32), sound, np.zeros(width + step, np.float32)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernels.shape[1])[::step]
    return (windows @ kernels.T).reshape(-1)[: -(-len(sound) * phases // step)]


def _kernels(step: int, phases: int) -> tuple[np.ndarray, int]:
    """Return the filter of each phase, float32[phases, 2 width + step], and how far it reaches."""
    cutoff = min(step, phases) * ROLLOFF
    width = math.ceil(ZEROS * step / cutoff)
    inputs = np.arange(-width, width + step, dtype=np.float32) / np.float32(step)  # rounded as torchaudio rounds them
    outputs = -np.arange(phases, dtype=np.float32)[:, None] / np.float32(phases)
    crossings = np.clip((inputs + outputs) * np.float32(cutoff), -ZEROS, ZEROS)
    window = np.cos(crossings * np.float32(math.pi) / np.float32(ZEROS) / 2) ** 2
    return np.sinc(crossings) * (window * np.float32(cutoff / step)), width

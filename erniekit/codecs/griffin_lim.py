"""Find the phases of magnitudes: Griffin and Lim's algorithm with momentum, in NumPy."""

from __future__ import annotations

import numpy as np

from erniekit.codecs.spectrogram import MelFrames, sound_of, spectra_of

STRETCH = 2000  # frames whose phases are looked for at once; a longer sound is joined from stretches
OVERLAP = 16  # frames of two stretches that are faded into each other


def griffin_lim(
    magnitudes: np.ndarray, frames: MelFrames, *, rounds: int = 32, momentum: float = 0.99, seed: int = 0
) -> np.ndarray:
    """Return sound whose short-time spectra have nearly the given magnitudes.

    Griffin and Lim 1984 (https://doi.org/10.1109/TASSP.1984.1164317), made faster by momentum as Perraudin, Balazs and
    Søndergaard 2013 (https://doi.org/10.1109/WASPAA.2013.6701851) do. The first phases are drawn from the seed. Beside
    magnitudes and sound, only the spectra of a stretch are in memory.

    Args:
        magnitudes: float[T, n_fft / 2 + 1].
        rounds: transforms back and forth; 0 leaves the random phases.

    Returns:
        float32[T * hop_length].
    """
    hop = frames.hop_length
    joined = np.zeros(len(magnitudes) * hop, np.float32)
    for number, first in enumerate(range(0, len(magnitudes), STRETCH)):
        start = max(0, first - OVERLAP)
        sound = _with_phases(magnitudes[start : first + STRETCH], frames, rounds, momentum, seed + number)
        if first > start:
            rising = np.linspace(0.0, 1.0, (first - start) * hop)
            joined[start * hop : first * hop] *= 1.0 - rising
            sound[: len(rising)] *= rising
        joined[start * hop : start * hop + len(sound)] += sound
    return joined


def _with_phases(magnitudes: np.ndarray, frames: MelFrames, rounds: int, momentum: float, seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).random(magnitudes.shape, np.float32)
    spectra = magnitudes * np.exp(2j * np.pi * drawn)
    before = np.zeros_like(spectra)
    for _ in range(rounds):
        found = spectra_of(sound_of(spectra, frames), frames)
        ahead = found + momentum * (found - before)
        before = found
        size = np.abs(ahead)
        np.maximum(size, 1e-12, out=size)
        spectra = ahead * (magnitudes / size)
    return sound_of(spectra, frames)

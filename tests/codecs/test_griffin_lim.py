"""Griffin and Lim's algorithm."""

from __future__ import annotations

import numpy as np

from erniekit.codecs import griffin_lim as module
from erniekit.codecs.griffin_lim import griffin_lim
from erniekit.codecs.spectrogram import MelFrames, spectra_of
from tests.data.media.sounds import tone

FRAMES = MelFrames()


def chirp() -> np.ndarray:
    time = np.arange(8000) / 16_000
    return (0.4 * np.sin(2 * np.pi * (300 * time + 900 * time**2))).astype(np.float32)


def inconsistency(wanted: np.ndarray, sound: np.ndarray) -> float:
    """How far the magnitudes of a sound are from those wanted, relative to them."""
    return float(np.linalg.norm(np.abs(spectra_of(sound, FRAMES)) - wanted) / np.linalg.norm(wanted))


def test_rounds_bring_the_magnitudes_nearer_and_momentum_helps():
    wanted = np.abs(spectra_of(chirp(), FRAMES))
    errors = [inconsistency(wanted, griffin_lim(wanted, FRAMES, rounds=rounds)) for rounds in (0, 8, 32)]
    assert errors[0] > 0.4 > errors[1] > errors[2] and errors[2] < 0.12
    plain = inconsistency(wanted, griffin_lim(wanted, FRAMES, rounds=32, momentum=0.0))
    assert errors[2] < plain


def test_phases_depend_on_the_seed_alone():
    wanted = np.abs(spectra_of(tone(0.2), FRAMES))
    first = griffin_lim(wanted, FRAMES, rounds=2)
    assert first.dtype == np.float32 and first.shape == (len(wanted) * 160,)
    np.testing.assert_array_equal(first, griffin_lim(wanted, FRAMES, rounds=2))
    assert not np.array_equal(first, griffin_lim(wanted, FRAMES, rounds=2, seed=1))


def test_silence_stays_silent():
    assert not griffin_lim(np.zeros((3, 257), np.float32), FRAMES).any()


def test_long_sound_is_joined_from_stretches(monkeypatch):
    monkeypatch.setattr(module, "STRETCH", 40)
    sound = np.tile(chirp(), 3)
    wanted = np.abs(spectra_of(sound, FRAMES))
    joined = griffin_lim(wanted, FRAMES)
    assert joined.shape == (150 * 160,) and np.isfinite(joined).all()
    assert inconsistency(wanted, joined) < 0.25

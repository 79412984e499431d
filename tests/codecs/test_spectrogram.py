"""Frames of sound and sound of frames."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.codecs.spectrogram import (
    MelFrames,
    log_mel_frames,
    magnitudes_of,
    mel_filters,
    sound_of,
    spectra_of,
)
from tests.data.media.sounds import noise, tone

FRAMES = MelFrames()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.sampled_from([(512, 160), (400, 160), (64, 32), (34, 5)]))
def test_sound_comes_back_from_its_transform(samples, sizes):
    frames = MelFrames(n_fft=sizes[0], hop_length=sizes[1], mel_bins=8)
    sound = noise(samples)
    spectra = spectra_of(sound, frames)
    assert spectra.shape == (frames.count(samples), sizes[0] // 2 + 1)
    back = sound_of(spectra, frames)
    assert len(back) == len(spectra) * sizes[1] >= samples
    np.testing.assert_allclose(back[:samples], sound, atol=1e-6)
    np.testing.assert_allclose(back[samples:], 0, atol=1e-6)


def test_frames_are_the_definition():
    """Frame t is the Fourier transform of the window around the middle of hop t, through the mel filters."""
    sound, t = noise(5000), 9
    start = t * 160 - (512 - 160) // 2
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(512) / 512)
    mel = mel_filters(FRAMES) @ np.abs(np.fft.rfft(sound[start : start + 512] * window))
    np.testing.assert_allclose(log_mel_frames(sound, FRAMES)[t], np.log(mel), rtol=1e-4)


def test_a_tone_is_in_its_band_and_silence_at_the_floor():
    mel = log_mel_frames(tone(0.5, hertz=1000.0), FRAMES)[20]
    edges = np.linspace(2595 * np.log10(1 + 40 / 700), 2595 * np.log10(1 + 8000 / 700), 82)
    assert abs(mel.argmax() - np.abs(edges[1:-1] - 2595 * np.log10(1 + 1000 / 700)).argmin()) <= 1
    silence = log_mel_frames(np.zeros(1, np.float32), FRAMES)
    assert silence.shape == (1, 80)
    np.testing.assert_allclose(silence, np.log(FRAMES.mel_floor), rtol=1e-6)


def test_a_frame_depends_only_on_the_sound_under_its_window():
    sound = noise(48_000)
    np.testing.assert_array_equal(log_mel_frames(sound[:16_000], FRAMES)[:98], log_mel_frames(sound, FRAMES)[:98])


def test_magnitudes_have_the_mel_bands_that_are_wanted():
    mel = log_mel_frames(noise(8000), FRAMES)
    found = magnitudes_of(mel, FRAMES)
    assert found.shape == (50, 257) and (found >= 0).all()
    np.testing.assert_allclose(magnitudes_of(np.tile(mel, (12, 1)), FRAMES)[550:], found, rtol=1e-3, atol=1e-6)
    assert np.abs(np.log(found @ mel_filters(FRAMES).T) - mel).mean() < 0.05


@pytest.mark.parametrize("mel_bins", [1, 80, 256])
def test_every_filter_hears_something(mel_bins):
    assert (mel_filters(MelFrames(mel_bins=mel_bins)).max(axis=1) > 0).all()


@pytest.mark.parametrize(
    "values, told",
    [
        ({"hop_length": 300}, "hop_length is 300: expected 2 to n_fft / 2 = 256"),
        ({"n_fft": 511}, "n_fft is 511"),
        ({"mel_bins": 0}, "mel_bins is 0"),
        ({"mel_bins": 513, "n_fft": 2048}, "mel_bins is 513: expected 1 to 512, at most n_fft / 2 and 512"),
        ({"highest_frequency": 9000.0}, "from 40 to 9000 Hz"),
        ({"mel_floor": 0.0}, "mel_floor"),
        ({"mel_floor": float("nan")}, "mel_floor"),
    ],
)
def test_unusable_values_are_named(values, told):
    assert told in MelFrames(**values).problem()
    assert not FRAMES.problem()

"""The log-mel spectrogram against its definition, summed term by term in float64; transformers': tests/parity."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.data.media.log_mel import log_mel, mel_filters
from tests.data.media.sounds import noise, tone


def defined(sound: np.ndarray, mel_bins: int, frames: int) -> np.ndarray:
    """The formula: every frame of the mirrored sound, every frequency, no fast transform."""
    padded = np.pad(np.pad(sound.astype(np.float64), (0, frames * 160 - len(sound))), 200, mode="reflect")
    time = np.arange(400)
    window = np.sin(np.pi * time / 400) ** 2
    waves = np.exp(-2j * np.pi * np.outer(np.arange(201), time) / 400)
    power = np.stack([np.abs(waves @ (padded[t * 160 : t * 160 + 400] * window)) ** 2 for t in range(frames)], 1)
    log = np.log10(np.maximum(mel_filters(mel_bins).astype(np.float64) @ power, 1e-10))
    return (np.maximum(log, log.max() - 8.0) + 4.0) / 4.0


@settings(max_examples=40, deadline=None)
@given(
    frames=st.integers(2, 24),
    filled=st.floats(0, 1),
    mel_bins=st.sampled_from([16, 80, 128]),
    loudness=st.sampled_from([1e-6, 1e-2, 1.0]),
    seed=st.integers(0, 99),
)
def test_it_equals_the_definition(frames, filled, mel_bins, loudness, seed):
    samples = max(1, round(filled * frames * 160))
    sound = noise(samples, seed=seed) * np.float32(loudness) * 10
    found = log_mel(sound, mel_bins, frames)
    assert found.dtype == np.float32 and found.shape == (mel_bins, frames)
    np.testing.assert_allclose(found, defined(sound, mel_bins, frames), atol=1e-5)


@pytest.mark.parametrize("samples", [1, 39, 40, 41, 159, 160, 1079, 1080, 1081, 1239, 1240, 1241, 1280])
def test_the_edges_of_a_window(samples):
    """Where the last frame sees the mirrored end, and where frames of silence begin."""
    sound = noise(samples)
    np.testing.assert_allclose(log_mel(sound, 20, 8), defined(sound, 20, 8), atol=1e-5)


def test_silence_is_the_lowest_value():
    assert (log_mel(np.zeros(500, np.float32), 80, 10) == (-10 + 4) / 4).all()
    found = log_mel(tone(0.5), 80, 300)  # 8 decades below the loudest, not the floor
    np.testing.assert_allclose(found[:, 60:], found.max() - 2.0, atol=1e-6)


def test_a_long_recording_has_no_seams_between_its_blocks():
    sound = noise(160 * 600)
    whole = log_mel(sound, 16, 600)
    part = log_mel(sound[160 * 250 : 160 * 270], 16, 20)
    assert abs(part.max() - whole.max()) < 0.3
    inner = slice(2, 17)
    np.testing.assert_allclose(whole[:, 250:270][:, inner], part[:, inner], atol=1e-5)


def test_filters_are_triangles_of_equal_area():
    for mel_bins in (80, 128):
        filters = mel_filters(mel_bins)
        assert filters.shape == (mel_bins, 201) and (filters >= 0).all() and (filters.sum(1) > 0).all()
        peaks = filters.argmax(1)
        assert (np.diff(peaks) >= 0).all()
    wide = mel_filters(16)[4:]  # many frequencies below each, so that their sum is near the area
    np.testing.assert_allclose(wide.sum(1) * 40, 1.0, atol=0.02)


DIGEST = """
import hashlib, numpy as np
from erniekit.data.media.log_mel import log_mel
sound = np.random.default_rng(0).normal(0, 0.1, 90_000).astype(np.float32)
print(*(hashlib.md5(log_mel(sound, bins, 600)).hexdigest() for bins in (16, 40, 80, 128)))
"""


def test_the_values_do_not_depend_on_the_number_of_threads():
    """Otherwise a run that is resumed on another number of cores would read other sounds."""
    found = set()
    for threads in ("1", "3"):
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        done = subprocess.run(
            [sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1


@pytest.mark.parametrize("samples, frames", [(0, 10), (1601, 10), (100, 1)])
def test_other_lengths_are_refused(samples, frames):
    with pytest.raises(ValueError, match=f"{samples} samples in {frames} frames"):
        log_mel(np.zeros(samples, np.float32), 80, frames)

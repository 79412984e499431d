"""The log-mel spectrogram against transformers' feature extractor of Whisper, in NumPy and in torch."""

from __future__ import annotations

import numpy as np
import pytest
from transformers.models.whisper import feature_extraction_whisper

from erniekit.data.media.audio_batch import clip_windows
from erniekit.data.media.clip import AudioInputs
from erniekit.data.media.log_mel import log_mel, mel_filters

pytestmark = pytest.mark.parity


def theirs(sound: np.ndarray, mel_bins: int, frames: int) -> np.ndarray:
    extractor = feature_extraction_whisper.WhisperFeatureExtractor(feature_size=mel_bins)
    np.testing.assert_allclose(mel_filters(mel_bins), extractor.mel_filters.T, atol=1e-8)
    made = extractor(sound, sampling_rate=16_000, max_length=frames * 160, return_tensors="np")
    return made["input_features"][0]


@pytest.mark.parametrize("mel_bins", [16, 80, 128])
@pytest.mark.parametrize("frames", [2, 7, 80, 3000])
@pytest.mark.parametrize("kind, tolerance", [("numpy", 1e-5), ("torch", 1e-4)])  # torch transforms in float32
def test_it_equals_the_extractor(monkeypatch, mel_bins, frames, kind, tolerance):
    monkeypatch.setattr(feature_extraction_whisper, "is_torch_available", lambda: kind == "torch")
    rng = np.random.default_rng(frames)
    lengths = {1, 2, 159, 161, *rng.integers(1, frames * 160, 3).tolist()}
    lengths |= {frames * 160 - missing for missing in (0, 1, 39, 40, 41, 159, 160, 161, 200)}
    for length in sorted(lengths if frames < 3000 else {1, 48_000, 479_999, 480_000}):
        if 0 < length <= frames * 160:
            sound = rng.normal(0, 0.1, length).astype(np.float32)
            np.testing.assert_allclose(
                log_mel(sound, mel_bins, frames), theirs(sound, mel_bins, frames), atol=tolerance
            )


def test_windows_of_a_long_recording_are_those_of_the_processor(monkeypatch):
    """VoxtralProcessor makes the spectrogram of the whole recording and reshapes it: the reshape has to be of equal
    windows in time, which [M, windows, T] transposed is."""
    monkeypatch.setattr(feature_extraction_whisper, "is_torch_available", lambda: False)
    inputs = AudioInputs(0, 128, 3000, 375, lambda frames: 375)
    sound = np.random.default_rng(0).normal(0, 0.1, 16_000 * 70).astype(np.float32)
    whole = theirs(sound, 128, 9000)
    windows = clip_windows(sound, inputs)
    assert windows.shape == (3, 128, 3000)
    np.testing.assert_allclose(windows, whole.reshape(128, 3, 3000).transpose(1, 0, 2), atol=1e-5)

"""The fitted codec: shapes at odd lengths, codes, its folder, and what is refused."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.codecs.open import open_codec
from erniekit.codecs.residual_kmeans import (
    ResidualKMeans,
    ResidualKMeansConfig,
    fit_residual_kmeans,
    open_residual_kmeans,
)
from erniekit.codecs.spectrogram import MelFrames, log_mel_frames
from erniekit.errors import ConfigurationError, DataError, ModelFileError
from tests.data.media.sounds import noise, tone

CONFIG = ResidualKMeansConfig(MelFrames(mel_bins=20), levels=3, codebook_size=16, griffin_lim_rounds=2)


def sounds() -> list[np.ndarray]:
    return [tone(0.5, hertz=hertz) + 0.1 * noise(8000, seed=int(hertz)) for hertz in (200.0, 700.0, 1800.0)]


@pytest.fixture(scope="module")
def codec() -> ResidualKMeans:
    return fit_residual_kmeans(sounds(), CONFIG)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 2000), st.sampled_from(["noise", "silence", "constant", "loud"]))
def test_any_sound_has_codes_and_they_give_sound(codec, samples, kind):
    made = {"noise": noise(samples), "silence": np.zeros(samples), "constant": np.full(samples, 0.5)}
    sound = made.get(kind, 200 * noise(samples)).astype(np.float32)
    codes = codec.encode(sound)
    assert codes.dtype == np.int32 and codes.shape == (3, -(-samples // 160))
    assert codes.min() >= 0 and codes.max() < 16
    np.testing.assert_array_equal(codes, codec.encode(sound.copy()))
    back = codec.decode(codes)
    assert back.dtype == np.float32 and back.shape == (codes.shape[1] * 160,) and np.isfinite(back).all()
    np.testing.assert_array_equal(back, codec.decode(codes.astype(np.int16)))


def test_each_level_takes_what_the_levels_before_leave(codec):
    sound = sounds()[0]
    codes, frames = codec.encode(sound), log_mel_frames(sound, CONFIG.frames).astype(np.float64)
    rest, errors = frames - codec.mean, []
    for level, centroids in zip(codes, codec.codebooks, strict=True):
        distances = np.square(rest[:, None] - centroids).sum(axis=2)
        chosen = np.take_along_axis(distances, level[:, None].astype(int), 1)[:, 0]
        assert (chosen <= distances.min(axis=1) * (1 + 1e-4) + 1e-6).all()
        rest = rest - centroids[level]
        errors.append(np.square(rest).mean())
    assert errors[0] > errors[1] > errors[2]


def test_sound_of_codes_resembles_the_sound(codec):
    """A tone is again the loudest band; with fewer levels, too."""
    for levels in (1, 3):
        back = codec.decode(codec.encode(tone(0.5, hertz=700.0))[:levels])
        assert abs(np.abs(np.fft.rfft(back)).argmax() * 16_000 / len(back) - 700) < 120


def test_neighbours_bring_frames_nearer_to_the_sound(codec):
    sound = 0.1 * noise(8000, seed=9) + tone(0.5, hertz=700.0)
    codes, frames = codec.encode(sound), log_mel_frames(sound, CONFIG.frames)
    alone = ResidualKMeans(replace(CONFIG, neighbour_weight=0.0), codec.mean, codec.codebooks).log_mel_of(codes)
    summed = codec.mean + sum(centroids[level] for centroids, level in zip(codec.codebooks, codes, strict=True))
    np.testing.assert_allclose(alone, summed, atol=1e-5)
    found = codec.log_mel_of(codes)
    np.testing.assert_allclose(found[3], 0.6 * alone[3] + 0.2 * (alone[2] + alone[4]), atol=1e-5)
    np.testing.assert_allclose(found[0], 0.8 * alone[0] + 0.2 * alone[1], atol=1e-5)
    middle = slice(3, -3)  # at the ends, sound begins and stops at once
    assert np.square((found - frames)[middle]).mean() < np.square((alone - frames)[middle]).mean()


def test_no_sound_at_all_has_one_silent_frame(codec):
    empty = codec.encode(np.zeros(0, np.float32))
    np.testing.assert_array_equal(empty, codec.encode(np.zeros(160, np.float32)))
    assert codec.decode(np.zeros((3, 0), np.int32)).shape == (0,)


def test_a_saved_codec_gives_the_same_codes(codec, tmp_path):
    codec.save(tmp_path)
    again = open_codec(tmp_path)
    assert isinstance(again, ResidualKMeans)
    for other in (again, pickle.loads(pickle.dumps(codec))):
        np.testing.assert_array_equal(other.encode(sounds()[1]), codec.encode(sounds()[1]))
        assert other.fingerprint == codec.fingerprint
    assert again.config == CONFIG and (again.levels, again.codebook_size) == (3, 16)
    assert (again.sampling_rate, again.frame_rate, again.can_decode) == (16_000, 100.0, True)


def test_the_first_levels_are_the_same_codes(codec, tmp_path):
    codec.save(tmp_path)
    coarse = open_codec(tmp_path, levels=2)
    np.testing.assert_array_equal(coarse.encode(sounds()[0]), codec.encode(sounds()[0])[:2])
    assert coarse.levels == 2 and coarse.fingerprint != codec.fingerprint
    for levels in (0, 4):
        with pytest.raises(ConfigurationError, match=f"{levels} levels: .* has 3; choose from 1"):
            open_residual_kmeans(tmp_path, levels=levels)


def test_equal_data_give_an_equal_codec(codec):
    assert fit_residual_kmeans(iter(sounds()), CONFIG).fingerprint == codec.fingerprint
    assert fit_residual_kmeans(sounds(), CONFIG, seed=1).fingerprint != codec.fingerprint
    assert fit_residual_kmeans(sounds(), CONFIG, max_seconds=0.5).fingerprint != codec.fingerprint
    assert fit_residual_kmeans(sounds(), CONFIG, max_frames=60).fingerprint != codec.fingerprint


def test_it_can_be_fitted_on_silence():
    silent = fit_residual_kmeans([np.zeros(5000, np.float32)], CONFIG)
    assert np.isfinite(silent.codebooks).all()
    assert np.abs(silent.decode(silent.encode(np.zeros(5000, np.float32)))).max() < 1e-2


@pytest.mark.parametrize(
    "codes, told",
    [
        (np.full((3, 2), 16), "code 16 of level 0, frame 0 is out of range"),
        (np.array([[0, 0], [0, -1], [0, 0]]), "code -1 of level 1, frame 1"),
        (np.zeros((4, 2), int), "1 to 3 levels"),
        (np.zeros(5, int), "levels, frames"),
        (np.zeros((3, 2)), "integers"),
    ],
)
def test_other_codes_are_refused(codec, codes, told):
    with pytest.raises(DataError, match=told):
        codec.decode(codes)


def damaged(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    "values, told",
    [
        ({"model_type": "dac"}, "config.json: model_type is 'dac': expected 'residual_kmeans'"),
        ({"levels": 4}, r"codebooks is F32 \[3, 16, 20\]: .*config.json describes F32 \[4, 16, 20\]"),
        ({"levels": "3"}, "levels is '3': expected int"),
        ({"levels": 0}, "levels is 0: expected 1 to 64"),
        ({"codebook_size": 10**9}, "codebook_size"),
        ({"griffin_lim_momentum": 10**400}, "griffin_lim_momentum is 1000000000"),
        ({"neighbour_weight": 0.4}, "neighbour_weight"),
        ({"griffin_lim_rounds": -1}, "griffin_lim_rounds"),
        ({"griffin_lim_momentum": 1}, "griffin_lim_momentum"),
        ({"odd": 1}, "odd is not known"),
        ({"frames": 7}, "frames is 7: expected an object"),
        ({"frames": {"n_fft": 512}}, "frames.highest_frequency is missing"),
    ],
)
def test_a_configuration_that_does_not_fit_is_named(codec, tmp_path, values, told):
    codec.save(tmp_path)
    damaged(tmp_path, **values)
    with pytest.raises(ModelFileError, match=told):
        open_residual_kmeans(tmp_path)


def test_damaged_arrays_are_named(codec, tmp_path):
    codec.save(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        open_residual_kmeans(tmp_path)
    path.write_bytes(whole[:-4] + np.float32(np.nan).tobytes())
    with pytest.raises(ModelFileError, match="NaN or infinite"):
        open_residual_kmeans(tmp_path)
    path.write_bytes(whole.replace(b'"mean"', b'"meen"'))
    with pytest.raises(ModelFileError, match="there is no 'mean'"):
        open_residual_kmeans(tmp_path)
    path.unlink()
    with pytest.raises(ModelFileError, match="no such file"):
        open_residual_kmeans(tmp_path)


def test_unusable_values_are_refused_before_anything_is_read():
    def unread():
        raise AssertionError("read")
        yield

    with pytest.raises(ConfigurationError, match="hop_length is 0"):
        fit_residual_kmeans(unread(), ResidualKMeansConfig(MelFrames(hop_length=0)))
    with pytest.raises(DataError, match="no sound to fit codes on"):
        fit_residual_kmeans([], CONFIG)

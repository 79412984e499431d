"""Units: over log-mel frames or features of a model, with own centroids or those of others."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from erniekit.codecs.clustering import nearest
from erniekit.codecs.hubert import SpeechModel
from erniekit.codecs.kmeans import (
    KMeans,
    KMeansConfig,
    LogMelFeatures,
    fit_kmeans,
    kmeans_of_centroids,
    open_kmeans,
    read_centroids,
)
from erniekit.codecs.open import open_codec
from erniekit.codecs.spectrogram import MelFrames, log_mel_frames
from erniekit.errors import ConfigurationError, DataError, ModelFileError
from tests.codecs.test_hubert import tiny
from tests.codecs.test_residual_kmeans import sounds

FRAMES = MelFrames(mel_bins=20)
CONFIG = KMeansConfig(12, frames=FRAMES)


class Halves:
    """Features of a model that there is not: the loudness of each half of 100 samples."""

    sampling_rate, frame_rate, size, shortest, fingerprint = 16_000, 160.0, 2, 100, "halves"

    def features(self, sound: np.ndarray) -> np.ndarray:
        if len(sound) < self.shortest:
            raise DataError("too short")
        pieces = sound[: len(sound) // 100 * 100].reshape(-1, 2, 50)
        return np.abs(pieces).mean(axis=2).astype(np.float32)


def test_units_are_the_nearest_centroids_of_log_mel_frames(tmp_path):
    codec = fit_kmeans(sounds(), CONFIG)
    for sound in (sounds()[0], np.zeros(1, np.float32)):
        units = codec.encode(sound)
        assert units.shape == (1, -(-len(sound) // 160)) and units.dtype == np.int32
        np.testing.assert_array_equal(units[0], nearest(log_mel_frames(sound, FRAMES), codec.centroids))
    assert (codec.levels, codec.codebook_size, codec.frame_rate, codec.can_decode) == (1, 12, 100.0, False)
    codec.save(tmp_path)
    again = open_codec(tmp_path, levels=1)
    assert isinstance(again, KMeans)
    assert again.fingerprint == codec.fingerprint == fit_kmeans(sounds(), CONFIG).fingerprint
    np.testing.assert_array_equal(again.encode(sounds()[1]), codec.encode(sounds()[1]))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(again)).centroids, codec.centroids)
    with pytest.raises(DataError, match="no way back to sound"):
        codec.decode(codec.encode(sounds()[0]))
    with pytest.raises(ConfigurationError, match="1 level, so 2"):
        open_kmeans(tmp_path, levels=2)


def test_units_of_a_models_features_leave_out_what_is_too_short():
    codec = fit_kmeans([sounds()[0], np.zeros(99, np.float32), sounds()[2]], KMeansConfig(4), Halves())
    assert codec.encode(sounds()[1]).shape == (1, 80) and codec.centroids.shape == (4, 2)
    assert codec.fingerprint != fit_kmeans(sounds(), CONFIG).fingerprint


def test_a_models_place_is_kept_and_a_missing_one_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = KMeansConfig(4, "hidden_states", model="hubert", layer=2)
    with pytest.raises(ModelFileError, match=f"{tmp_path}/hubert: no such folder"):
        fit_kmeans(sounds(), config)
    fit_kmeans(sounds(), config, Halves()).save(tmp_path / "units")
    monkeypatch.chdir("/")
    with pytest.raises(ModelFileError, match=f"{tmp_path}/hubert: no such folder"):
        open_kmeans(tmp_path / "units")
    again = open_kmeans(tmp_path / "units", features=Halves())
    assert (again.config.layer, again.config.model) == (2, str(tmp_path / "hubert"))


def test_units_over_hidden_states_are_opened_with_their_model(tmp_path):
    model, units, sound = tiny(tmp_path / "hubert"), tmp_path / "units", sounds()[0][:1600]
    codec = fit_kmeans([sound, sounds()[1][:800]], KMeansConfig(6, "hidden_states", model=str(model), layer=2))
    expected = nearest(SpeechModel(model, 2).features(sound), codec.centroids)
    codec.save(units)
    again = open_codec(units)
    np.testing.assert_array_equal(again.encode(sound)[0], expected)
    assert (again.frame_rate, again.fingerprint) == (800, codec.fingerprint)
    path = units / "config.json"
    path.write_text(path.read_text().replace(str(model), "../hubert"))
    assert open_codec(units).fingerprint == codec.fingerprint
    path.write_text(path.read_text().replace('"layer": 2', '"layer": 1'))
    assert open_codec(units).fingerprint != codec.fingerprint


@pytest.mark.parametrize(
    "values, told",
    [
        ({"features": "mfcc"}, "expected 'log_mel' or 'hidden_states'"),
        ({"features": "hidden_states"}, "`model` has to name"),
        ({"codebook_size": 0}, "codebook_size is 0"),
        ({"frames": MelFrames(mel_floor=-1.0)}, "mel_floor"),
    ],
)
def test_unusable_values_are_refused(values, told):
    with pytest.raises(ConfigurationError, match=told):
        fit_kmeans(sounds(), KMeansConfig(**values))


@pytest.mark.parametrize("kind", ["npy", "float64.npy", "safetensors"])
def test_centroids_of_others_are_read(tmp_path, kind):
    centroids = np.random.default_rng(0).normal(-2, 2, (7, 20)).astype(np.float32)
    path = tmp_path / f"centroids.{kind}"
    if kind == "safetensors":
        save_file({"centroids": centroids, "count": np.zeros(7, np.float32)}, path)
    else:
        np.save(path, centroids.astype(np.float64 if "64" in kind else np.float32))
    np.testing.assert_array_equal(read_centroids(path), centroids)
    codec = kmeans_of_centroids(path, CONFIG)
    assert codec.codebook_size == codec.config.codebook_size == 7
    np.testing.assert_array_equal(codec.centroids, centroids)
    codec.save(tmp_path / "codec")
    assert open_kmeans(tmp_path / "codec").fingerprint == codec.fingerprint
    with pytest.raises(ModelFileError, match="20 values each, and the features 80"):
        kmeans_of_centroids(path, KMeansConfig(), LogMelFeatures(MelFrames()))


class Trap:
    """What a pickle may do when it is opened."""

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("opened"),))


def test_pickles_are_not_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("km.bin").write_bytes(pickle.dumps(Trap()))
    np.save("object.npy", np.array([[Trap()]], object), allow_pickle=True)
    Path("pickle.npy").write_bytes(pickle.dumps(Trap()))
    for name, told in (("km.bin", "pickles"), ("object.npy", "not an array"), ("pickle.npy", "not an array")):
        with pytest.raises(ModelFileError, match=told) as raised:
            read_centroids(Path(name))
        assert "numpy.save('centroids.npy'" in str(raised.value)
    assert not Path("opened").exists()


@pytest.mark.parametrize(
    "array, told",
    [
        (np.zeros(5, np.float32), "expected a matrix"),
        (np.zeros((0, 3), np.float32), "expected a matrix"),
        (np.array([["a"]]), "expected a matrix"),
        (np.array([[1.0, np.inf]], np.float32), "NaN or infinite"),
    ],
)
def test_other_arrays_are_named(tmp_path, array, told):
    np.save(tmp_path / "centroids.npy", array)
    with pytest.raises(ModelFileError, match=told):
        read_centroids(tmp_path / "centroids.npy")
    with pytest.raises(ModelFileError, match="no such file"):
        read_centroids(tmp_path / "other.npy")

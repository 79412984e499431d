"""Of what a fitted codec is told apart from others, and what is fitted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.build import codec
from erniekit.build.codec import fit_codec, fit_request
from erniekit.codecs.kmeans import LogMelFeatures
from erniekit.config import Config

COMMON = {"codec", "codebook_size", "codec_fit_seconds", "duration_range", "audio_peak", "seed"}


def _config(**values: Any) -> Config:
    return Config.from_mapping({"output_dir": "o", "train_dataset_path": "t.jsonl"} | values, verb="codes")


@pytest.mark.proves("codec", "codec_levels")
def test_levels_are_of_a_residual_codec_and_features_of_units() -> None:
    residual, units = fit_request(_config(codec_levels=3)), fit_request(_config(codec="kmeans"))
    assert residual.keys() == COMMON | {"codec_levels"} and residual["codec_levels"] == 3
    assert units.keys() == COMMON | {"codec_features", "codec_layer"}
    assert (residual["codec"], units["codec"]) == ("residual_kmeans", "kmeans")


@pytest.mark.proves("codec_centroids")
def test_centroids_are_known_by_their_content(tmp_path: Path) -> None:
    path = tmp_path / "centroids.npy"
    found = []
    for value in (1.0, 2.0, 1.0):
        np.save(path, np.full((2, 3), value))
        found.append(fit_request(_config(codec="kmeans", codec_centroids=str(path)))["codec_centroids"])
    assert found[0] == found[2] != found[1]
    assert "codec_centroids" not in fit_request(_config(codec="residual_kmeans", codec_centroids=str(path)))


@pytest.mark.proves("codec_levels", "codebook_size")
def test_as_many_levels_are_fitted_as_asked(tmp_path: Path) -> None:
    def sounds(rate: int) -> Iterator[np.ndarray]:
        yield np.random.default_rng(0).normal(0, 0.1, rate // 4).astype(np.float32)

    for levels, expected in ((2, 2), (None, 4)):
        config = _config(codec_levels=levels, codebook_size=4)
        fit_codec(config, sounds, tmp_path / str(levels), fit_request(config))
        stored = json.loads((tmp_path / str(levels) / "config.json").read_text(encoding="utf-8"))
        assert (stored["levels"], stored["codebook_size"]) == (expected, 4)


@pytest.mark.proves("codec_fit_seconds")
def test_no_more_sound_is_read_than_asked(tmp_path: Path) -> None:
    heard = []

    def sounds(rate: int) -> Iterator[np.ndarray]:
        for number in range(5):
            heard.append(number)
            yield np.random.default_rng(number).normal(0, 0.1, rate // 4).astype(np.float32)

    config = _config(codec_levels=1, codebook_size=4, codec_fit_seconds=0.4)
    fit_codec(config, sounds, tmp_path / "codec", fit_request(config))
    assert heard == [0, 1]


@pytest.mark.proves("seed")
@pytest.mark.parametrize("values", [{"codec_levels": 1}, {"codec": "kmeans"}], ids=str)
def test_the_seed_draws_the_first_centroids(tmp_path: Path, values: dict[str, Any]) -> None:
    def sounds(rate: int) -> Iterator[np.ndarray]:
        yield np.random.default_rng(0).normal(0, 0.1, rate).astype(np.float32)

    found = []
    for number, seed in enumerate((1, 2, 1)):
        config = _config(**values, codebook_size=4, seed=seed)
        assert fit_request(config)["seed"] == seed
        folder = tmp_path / str(number)
        fit_codec(config, sounds, folder, fit_request(config))
        found.append((folder / "model.safetensors").read_bytes())
    assert found[0] == found[2] != found[1]


def test_the_features_of_units_are_computed_on_the_device_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sounds(rate: int) -> Iterator[np.ndarray]:
        yield np.random.default_rng(0).normal(0, 0.1, rate // 4).astype(np.float32)

    chosen: list[str] = []
    monkeypatch.setattr(codec, "_select", chosen.append)
    monkeypatch.setattr("erniekit.codecs.kmeans.open_features", lambda described: LogMelFeatures(described.frames))
    config = _config(codec="kmeans", codebook_size=4, codec_features=str(tmp_path), codec_layer=1, device="npu:1")
    fit_codec(config, sounds, tmp_path / "codec", {})
    assert chosen == ["npu:1"]

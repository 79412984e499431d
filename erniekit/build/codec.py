"""The codec of `erniekit codes`: the folder that a configuration names, or one fitted on its recordings."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from erniekit.codecs.codec import Codec
from erniekit.config import Config
from erniekit.config.sections.codes import DEFAULT_CODES, FITTED
from erniekit.environment import import_paddle
from erniekit.errors import ConfigurationError
from erniekit.hub.cache import chosen_hub
from erniekit.hub.download import find_model_folder
from erniekit.json_files import read_json_object

logger = logging.getLogger(__name__)

FIT_FACTS = "fit.json"  # in the folder of a fitted codec: what it was fitted on
DEFAULT_LEVELS = 4
LOG_MEL = "log_mel"  # of codec_features
Sounds = Callable[[int], Iterator[np.ndarray]]  # of a sampling rate: the recordings to fit on


def is_fitted(config: Config) -> bool:
    """Return whether the codec is fitted on the recordings of the configuration."""
    return config.codes.codec in FITTED


def named_codec(config: Config) -> Path:
    """Return the folder that `codec` names, which is fetched where a hub is chosen.

    Raises:
        ModelFileError: there is none.
    """
    return find_model_folder(config.codes.codec, chosen_hub(config), parameter="codec").absolute()


def codec_opener(folder: Path, levels: int | None, device: str) -> Callable[[], Codec]:
    """Return what opens a codec, in this process or in another one, on a device."""
    return partial(_open, folder, levels, device)


def _open(folder: Path, levels: int | None, device: str) -> Codec:
    from erniekit.codecs.open import open_codec

    if _needs_paddle(folder):
        _select(device)
    return open_codec(folder, levels=levels)


def _select(device: str) -> None:
    import_paddle()
    from erniekit.model.device import use_device

    use_device(device)


def _needs_paddle(folder: Path) -> bool:
    """Return whether a codec is a network; k-means over spectrograms needs NumPy alone."""
    described = read_json_object(folder / "config.json")
    return described.get("model_type") not in FITTED or described.get("features") == "hidden_states"


def fit_request(config: Config) -> dict[str, Any]:
    """Return what a fitted codec depends on, beside the recordings."""
    section = config.codes
    names = ["codec", "codebook_size", "codec_fit_seconds", "duration_range", "audio_peak"]
    makes_units = section.codec == "kmeans"
    names += ["codec_features", "codec_layer"] if makes_units else ["codec_levels"]
    values = {name: config[name] for name in names} | {"seed": config.training.seed}
    if makes_units and section.codec_centroids:
        values["codec_centroids"] = hashlib.sha256(Path(section.codec_centroids).expanduser().read_bytes()).hexdigest()
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def fitted_codec(folder: Path, request: dict[str, Any], *, overwrite: bool) -> bool:
    """Return whether a folder has the codec that is asked for; one that was fitted in another way is refused.

    Args:
        overwrite: remove such a codec instead of refusing it.

    Raises:
        ConfigurationError: it was, or it is another folder.
    """
    if not folder.exists():
        return False
    path = folder / FIT_FACTS
    before = read_json_object(path) if path.is_file() else {}
    differing = sorted(name for name in {*before, *request} if before.get(name) != request.get(name))
    if not differing:
        return True
    if overwrite and before:
        logger.info(f"overwrite_output_dir: removing the codec in {folder}")
        os.replace(folder, _partial(folder))  # never half a codec under its name
        return False
    what = f"with other values of {', '.join(differing)}" if before else "by something else"
    again = "overwrite_output_dir: true to have it fitted again, " if before else ""
    raise ConfigurationError(
        f"output_dir: {folder} has a codec that was made {what}\n  Write codec: {folder} to encode with it, "
        f"{again}or another output_dir."
    )


def fit_codec(config: Config, sounds: Sounds, folder: Path, request: dict[str, Any]) -> None:
    """Fit the codec of a configuration; its folder is complete or absent.

    Raises:
        UserError: there is no sound, or a value cannot be used.
    """
    temp_path = _partial(folder)
    temp_path.mkdir(parents=True)
    try:
        fit = _fit_units if config.codes.codec == "kmeans" else _fit_residual
        fit(config, sounds, temp_path)
        (temp_path / FIT_FACTS).write_text(json.dumps(request, indent=2) + "\n", encoding="utf-8")
        os.replace(temp_path, folder)
    finally:
        shutil.rmtree(temp_path, ignore_errors=True)


def _partial(folder: Path) -> Path:
    """Return where a codec lies until it is complete; nothing is there."""
    temp_path = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(temp_path, ignore_errors=True)
    return temp_path


def _fit_residual(config: Config, sounds: Sounds, folder: Path) -> None:
    from erniekit.codecs.residual_kmeans import ResidualKMeansConfig, fit_residual_kmeans

    section = config.codes
    described = ResidualKMeansConfig(
        levels=section.codec_levels or DEFAULT_LEVELS, codebook_size=section.codebook_size or DEFAULT_CODES
    )
    fit_residual_kmeans(
        sounds(described.frames.sampling_rate),
        described,
        max_seconds=section.codec_fit_seconds,
        seed=config.training.seed,
    ).save(folder)


def _fit_units(config: Config, sounds: Sounds, folder: Path) -> None:
    from erniekit.codecs.kmeans import HIDDEN_STATES, KMeansConfig, fit_kmeans, kmeans_of_centroids, open_features

    section = config.codes
    described = KMeansConfig(codebook_size=section.codebook_size or DEFAULT_CODES)
    if section.codec_features != LOG_MEL:
        model = find_model_folder(section.codec_features, chosen_hub(config), parameter="codec_features").absolute()
        _select(config.basic.device)
        layer = _last_layer(model) if section.codec_layer is None else section.codec_layer
        described = replace(described, features=HIDDEN_STATES, model=str(model), layer=layer)
    features = open_features(described)
    if section.codec_centroids:
        kmeans_of_centroids(Path(section.codec_centroids).expanduser(), described, features).save(folder)
        return
    fit_kmeans(
        sounds(features.sampling_rate),
        described,
        features,
        max_seconds=section.codec_fit_seconds,
        seed=config.training.seed,
    ).save(folder)


def _last_layer(model: Path) -> int:
    from erniekit.codecs.hubert import SpeechModelConfig

    path = model / "config.json"
    return SpeechModelConfig.from_json(path, read_json_object(path)).num_hidden_layers

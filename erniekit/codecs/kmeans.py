"""Units: the number of the k-means centroid that is nearest to a frame's features. One level, and no sound back.

The features are log-mel frames, or the hidden states of a layer of a speech model, as for the units of HuBERT
(Hsu et al. 2021, arXiv:2106.07447) and of generative spoken language models (Lakhotia et al. 2021, arXiv:2102.01192).

A folder holds `config.json`, `model_type: kmeans`, with the values of `KMeansConfig`, and `model.safetensors` with
`centroids` float32[codebook_size, size of the features]. `read_centroids` takes those of others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from erniekit.codecs.checks import check_sound
from erniekit.codecs.clustering import MAX_ROUNDS, fit_centroids, nearest
from erniekit.codecs.fitted_folder import digest_of, read_arrays, read_config, write_fitted
from erniekit.codecs.frame_sample import sample_frames
from erniekit.codecs.spectrogram import MelFrames, log_mel_frames
from erniekit.errors import ConfigurationError, DataError, ModelFileError
from erniekit.model.storage.safetensors import SafetensorsFile, check_finite

MODEL_TYPE = "kmeans"
LOG_MEL, HIDDEN_STATES = "log_mel", "hidden_states"
MAX_FRAMES = 120_000  # that centroids are fitted on


class Features(Protocol):
    """What makes features of sound; `hubert.SpeechModel` does.

    Attributes:
        sampling_rate: of the sound, in Hz.
        frame_rate: frames per second.
        size: of a frame's features.
        fingerprint: hex digest of everything that determines the features of a sound.
    """

    sampling_rate: int
    frame_rate: float
    size: int
    fingerprint: str

    def features(self, sound: np.ndarray) -> np.ndarray:
        """Return float32[frames, size] of float32[samples]."""
        ...


class LogMelFeatures:
    """Log-mel frames as `Features`."""

    def __init__(self, frames: MelFrames) -> None:
        self.frames = frames
        self.sampling_rate, self.frame_rate, self.size = frames.sampling_rate, frames.frame_rate, frames.mel_bins
        self.fingerprint = digest_of([LOG_MEL, asdict(frames)], {})

    def features(self, sound: np.ndarray) -> np.ndarray:
        return log_mel_frames(sound, self.frames)


@dataclass(frozen=True)
class KMeansConfig:
    """What `config.json` holds.

    Attributes:
        codebook_size: centroids.
        features: `log_mel` or `hidden_states`.
        frames: of `log_mel`; its values stand in an object of their own.
        model: of `hidden_states`: the folder of the speech model; a relative path begins in the codec's folder.
        layer: of `hidden_states`: the index into transformers' `hidden_states`.
    """

    codebook_size: int = 256
    features: str = LOG_MEL
    frames: MelFrames = field(default_factory=MelFrames)
    model: str = ""
    layer: int = 0

    def problem(self) -> str:
        """Return what makes these values unusable; "" if nothing does."""
        if not 1 <= self.codebook_size <= 1 << 20:
            return f"codebook_size is {self.codebook_size}: expected 1 to 1,048,576"
        if self.features not in (LOG_MEL, HIDDEN_STATES):
            return f"features is {self.features!r}: expected {LOG_MEL!r} or {HIDDEN_STATES!r}"
        if self.features == HIDDEN_STATES and not self.model:
            return "features is 'hidden_states', so `model` has to name the folder of a speech model"
        return self.frames.problem() if self.features == LOG_MEL else ""


class KMeans:
    """A `Codec` of one level that cannot decode."""

    def __init__(self, config: KMeansConfig, centroids: np.ndarray, features: Features) -> None:
        """Take float32[codebook_size, features.size]."""
        self.config, self.centroids, self._features = config, centroids, features
        self.sampling_rate, self.frame_rate = features.sampling_rate, features.frame_rate
        self.levels, self.codebook_size, self.can_decode = 1, len(centroids), False
        self.fingerprint = digest_of([MODEL_TYPE, features.fingerprint], {"centroids": centroids})

    def encode(self, sound: np.ndarray) -> np.ndarray:
        """Return int32[1, frames] of float32[samples].

        Raises:
            DataError: the sound is too short for the speech model.
        """
        return nearest(self._features.features(check_sound(sound)), self.centroids)[None]

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Raise DataError: units do not say how the sound was."""
        raise DataError(
            "k-means units have no way back to sound: they keep what is said and drop how.\n"
            "  Use codec: residual_kmeans, or a neural codec, where sound is wanted back."
        )

    def save(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors` into a folder; a speech model stays where it is."""
        write_fitted(folder, MODEL_TYPE, self.config, {"centroids": self.centroids})


def fit_kmeans(
    sounds: Iterable[np.ndarray],
    config: KMeansConfig | None = None,
    features: Features | None = None,
    *,
    max_frames: int = MAX_FRAMES,
    max_seconds: float | None = None,
    max_rounds: int = MAX_ROUNDS,
    seed: int = 0,
) -> KMeans:
    """Fit units on recordings, of which one at a time is in memory, with a sample of their frames.

    Equal recordings in equal order give equal centroids (where the speech model gives equal features).

    Args:
        sounds: float32[samples] each, at the sampling rate of the features. Those too short for a speech model are
            left out.
        features: opened already; None: those of the configuration.
        max_frames: that the centroids are fitted on, sampled from all.
        max_seconds: of sound that are read; None: all.

    Raises:
        ConfigurationError: a value of the configuration cannot be used.
        DataError: there is no sound.
        ModelFileError: the speech model cannot be opened.
    """
    config = config or KMeansConfig()
    if problem := config.problem():
        raise ConfigurationError(problem)
    config = _with_place(config, Path())
    source = features or open_features(config)
    sample = sample_frames(
        sounds,
        source.features,
        sampling_rate=source.sampling_rate,
        shortest=getattr(source, "shortest", 1),
        codes=config.codebook_size,
        max_frames=max_frames,
        max_seconds=max_seconds,
        seed=seed,
    )
    found = fit_centroids(sample, config.codebook_size, seed=seed, max_rounds=max_rounds)
    return KMeans(config, found.centroids, source)


def open_kmeans(folder: Path, *, levels: int | None = None, features: Features | None = None) -> KMeans:
    """Open saved units.

    Args:
        levels: 1 or None.
        features: opened already; None: those of the configuration.

    Raises:
        ModelFileError: a file is missing, damaged, or does not fit the other; or so for the speech model.
        ConfigurationError: another number of levels is asked for.
    """
    folder = Path(folder)
    config = _with_place(read_config(folder, MODEL_TYPE, KMeansConfig), folder)
    if levels not in (None, 1):
        raise ConfigurationError(f"{folder}: k-means units have 1 level, so {levels} cannot be used")
    source = features or open_features(config)
    centroids = read_arrays(folder, {"centroids": (config.codebook_size, source.size)})["centroids"]
    return KMeans(config, centroids, source)


def kmeans_of_centroids(path: Path, config: KMeansConfig, features: Features | None = None) -> KMeans:
    """Return units whose centroids somebody else has fitted; `save` makes a folder of them.

    Args:
        path: of a file that `read_centroids` reads.
        config: its `codebook_size` is that of the file.

    Raises:
        ModelFileError: the file cannot be read, or its centroids have not the size of the features.
        ConfigurationError: a value of the configuration cannot be used.
    """
    if problem := config.problem():
        raise ConfigurationError(problem)
    config = _with_place(config, Path())
    centroids, source = read_centroids(path), features or open_features(config)
    if centroids.shape[1] != source.size:
        raise ModelFileError(
            f"{path}: the centroids have {centroids.shape[1]} values each, and the features {source.size}: they were "
            "fitted on other features (another model or layer)"
        )
    return KMeans(replace(config, codebook_size=len(centroids)), centroids, source)


def open_features(config: KMeansConfig) -> Features:
    """Return the features of a configuration; a speech model is opened, and Paddle imported, only for its own.

    Raises:
        ModelFileError: the speech model is not there, or cannot be opened.
    """
    if config.features == LOG_MEL:
        return LogMelFeatures(config.frames)
    if not Path(config.model).is_dir():
        raise ModelFileError(
            f"{config.model}: no such folder. The units are those of a speech model's hidden states: put the model "
            "there, or write its place as `model` into the config.json of the units"
        )
    from erniekit.codecs.hubert import SpeechModel

    return SpeechModel(config.model, config.layer)


def _with_place(config: KMeansConfig, folder: Path) -> KMeansConfig:
    """Return a configuration whose model has an absolute path; a relative one begins in `folder`."""
    return replace(config, model=str((folder / config.model).absolute())) if config.model else config


def read_centroids(path: Path) -> np.ndarray:
    """Read the centroids of others, float32[K, D]: `.npy`, or `.safetensors` with one matrix.

    Raises:
        ModelFileError: there is no such file, it is a pickle (which can run any program) or damaged, or it holds
            something else than a matrix of finite numbers.
    """
    path = Path(path)
    if not path.is_file():
        raise ModelFileError(f"{path}: no such file with centroids")
    if path.suffix == ".safetensors":
        file = SafetensorsFile(path)
        matrices = [name for name in file.names() if len(file.shape(name)) == 2]
        if len(matrices) != 1:
            raise ModelFileError(f"{path}: {len(matrices)} matrices: expected one, the centroids [K, D]")
        found = file.read(matrices[0])
    elif path.suffix == ".npy":
        try:
            found = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise ModelFileError(f"{path}: not an array of NumPy: {str(error).splitlines()[0]}.\n{_RECIPE}") from None
    else:
        raise ModelFileError(
            f"{path}: centroids are read from .npy and .safetensors; other files, such as those of fairseq and joblib, "
            f"are pickles, which can run any program when they are opened.\n{_RECIPE}"
        )
    if found.ndim != 2 or found.dtype.kind not in "fiu" or not found.size:
        raise ModelFileError(f"{path}: {found.dtype}{list(found.shape)}: expected a matrix of numbers, the centroids")
    found = np.ascontiguousarray(found, np.float32)
    check_finite(found, "centroids", path)
    return found


_RECIPE = (
    "  If you trust the one who made it, turn it into an array where its packages are installed:\n"
    "  python -c \"import joblib, numpy; numpy.save('centroids.npy', joblib.load('km.bin').cluster_centers_)\""
)

"""A codec fitted on recordings in a minute: residual k-means on log-mel frames, back to sound by Griffin-Lim.

Each level has a codebook. The first level's code is the centroid nearest to the frame, the next one's that nearest to
what the levels before have left over (residual vector quantization, Juang and Gray 1982, as neural codecs use it). The
sound of codes is that of the summed centroids, with phases found by Griffin and Lim's algorithm. Windows of
neighbouring frames overlap, and the errors of their codes do not depend on each other, so some of each is taken from
its neighbours. NumPy only.

A folder holds `config.json`, `model_type: residual_kmeans`, with the values of `ResidualKMeansConfig`, and
`model.safetensors`: `mean` float32[mel_bins] and `codebooks` float32[levels, codebook_size, mel_bins].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from erniekit.codecs.checks import check_codes, check_levels, check_sound
from erniekit.codecs.clustering import fit_centroids, nearest
from erniekit.codecs.fitted_folder import digest_of, read_arrays, read_config, write_fitted
from erniekit.codecs.frame_sample import sample_frames
from erniekit.codecs.griffin_lim import griffin_lim
from erniekit.codecs.spectrogram import MelFrames, log_mel_frames, magnitudes_of
from erniekit.errors import ConfigurationError

MODEL_TYPE = "residual_kmeans"
MAX_FRAMES = 120_000  # that the codebooks are fitted on: 20 minutes, or as many out of more


@dataclass(frozen=True)
class ResidualKMeansConfig:
    """What `config.json` holds.

    Attributes:
        frames: what is quantized (its values stand in the file one by one).
        levels: codebooks.
        codebook_size: centroids of each.
        neighbour_weight: of each of the two neighbours of a frame when sound is made, 0 to 1/3.
        griffin_lim_rounds: transforms back and forth when sound is made.
        griffin_lim_momentum: 0 to less than 1; 0 is the algorithm as first published.
    """

    frames: MelFrames = field(default_factory=MelFrames)
    levels: int = 4
    codebook_size: int = 256
    neighbour_weight: float = 0.2
    griffin_lim_rounds: int = 32
    griffin_lim_momentum: float = 0.99

    def problem(self) -> str:
        """Return what makes these values unusable; "" if nothing does."""
        if found := self.frames.problem():
            return found
        if not 1 <= self.levels <= 64:
            return f"levels is {self.levels}: expected 1 to 64"
        if not 1 <= self.codebook_size <= 1 << 15:
            return f"codebook_size is {self.codebook_size}: expected 1 to 32,768"
        if not 0 <= self.neighbour_weight <= 1 / 3:
            return f"neighbour_weight is {self.neighbour_weight}: expected 0 to 1/3"
        if not 0 <= self.griffin_lim_rounds <= 10_000:
            return f"griffin_lim_rounds is {self.griffin_lim_rounds}: expected 0 to 10,000"
        if not 0 <= self.griffin_lim_momentum < 1:
            return f"griffin_lim_momentum is {self.griffin_lim_momentum}: expected at least 0 and less than 1"
        return ""


class ResidualKMeans:
    """A `Codec` of fitted codebooks."""

    def __init__(self, config: ResidualKMeansConfig, mean: np.ndarray, codebooks: np.ndarray) -> None:
        """Take float32[mel_bins] and float32[levels, codebook_size, mel_bins]."""
        self.config = config
        self.mean, self.codebooks = mean, codebooks
        self.sampling_rate = config.frames.sampling_rate
        self.frame_rate = config.frames.frame_rate
        self.levels, self.codebook_size = codebooks.shape[:2]
        self.can_decode = True
        self.fingerprint = digest_of([MODEL_TYPE, asdict(config.frames)], {"mean": mean, "codebooks": codebooks})

    def encode(self, sound: np.ndarray) -> np.ndarray:
        """Return int32[levels, frames] of float32[samples]: a frame for each begun hop, and at least one."""
        rest = log_mel_frames(check_sound(sound), self.config.frames) - self.mean
        codes = np.empty((self.levels, len(rest)), np.int32)
        for level, centroids in enumerate(self.codebooks):
            codes[level] = nearest(rest, centroids)
            rest -= centroids[codes[level]]
        return codes

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Return float32[frames * hop_length] of int[levels, frames]; of fewer levels a coarser sound.

        Raises:
            DataError: a code is out of range, or their shape is wrong.
        """
        config = self.config
        return griffin_lim(
            magnitudes_of(self.log_mel_of(codes), config.frames),
            config.frames,
            rounds=config.griffin_lim_rounds,
            momentum=config.griffin_lim_momentum,
        )

    def log_mel_of(self, codes: np.ndarray) -> np.ndarray:
        """Return the frames that codes stand for, float32[frames, mel_bins], each with a part of its neighbours.

        Raises:
            DataError: as `decode`.
        """
        codes = check_codes(codes, self)
        log_mel = np.tile(self.mean, (codes.shape[1], 1))
        for centroids, level in zip(self.codebooks, codes, strict=False):
            log_mel += centroids[level]
        weight = np.float32(self.config.neighbour_weight)
        if not weight or not len(log_mel):
            return log_mel
        around = np.concatenate([log_mel[:1], log_mel, log_mel[-1:]])
        return (1 - 2 * weight) * log_mel + weight * (around[:-2] + around[2:])

    def save(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors` into a folder."""
        write_fitted(folder, MODEL_TYPE, self.config, {"mean": self.mean, "codebooks": self.codebooks})


def fit_residual_kmeans(
    sounds: Iterable[np.ndarray],
    config: ResidualKMeansConfig | None = None,
    *,
    max_frames: int = MAX_FRAMES,
    max_seconds: float | None = None,
    seed: int = 0,
) -> ResidualKMeans:
    """Fit a codec on recordings, of which one at a time is in memory, with a sample of their frames.

    Equal recordings in equal order give equal codebooks.

    Args:
        sounds: float32[samples] each, at the sampling rate of the configuration.
        max_frames: that the codebooks are fitted on, sampled from all.
        max_seconds: of sound that are read; None: all.

    Raises:
        ConfigurationError: a value of the configuration cannot be used.
        DataError: there is no sound.
    """
    config = config or ResidualKMeansConfig()
    if problem := config.problem():
        raise ConfigurationError(problem)
    rest = sample_frames(
        sounds,
        lambda sound: log_mel_frames(sound, config.frames),
        sampling_rate=config.frames.sampling_rate,
        codes=config.codebook_size,
        max_frames=max_frames,
        max_seconds=max_seconds,
        seed=seed,
    )
    mean = rest.mean(axis=0, dtype=np.float64).astype(np.float32)
    rest = rest - mean
    codebooks = []
    for level in range(config.levels):
        found = fit_centroids(rest, config.codebook_size, seed=seed + level)
        rest -= found.centroids[found.codes]
        codebooks.append(found.centroids)
    return ResidualKMeans(config, mean, np.stack(codebooks))


def open_residual_kmeans(folder: Path, *, levels: int | None = None) -> ResidualKMeans:
    """Open a saved codec.

    Args:
        levels: the first levels to use; None: all. The codes of the others are the same without the rest.

    Raises:
        ModelFileError: a file is missing, damaged, or does not fit the other.
        ConfigurationError: the codec has fewer levels.
    """
    config = read_config(folder, MODEL_TYPE, ResidualKMeansConfig)
    shape = (config.levels, config.codebook_size, config.frames.mel_bins)
    arrays = read_arrays(folder, {"mean": shape[2:], "codebooks": shape})
    used = check_levels(levels, config.levels, folder)
    return ResidualKMeans(config, arrays["mean"], arrays["codebooks"][:used])

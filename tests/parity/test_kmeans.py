"""k-means against scikit-learn: the same assignments by the same centroids, and fits as good as its own."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.cluster import KMeans

from erniekit.codecs.clustering import fit_centroids, nearest
from erniekit.codecs.residual_kmeans import ResidualKMeansConfig, fit_residual_kmeans
from erniekit.codecs.spectrogram import MelFrames, log_mel_frames
from tests.data.media.sounds import noise, tone

pytestmark = pytest.mark.parity

FRAMES = MelFrames()


def theirs(centroids: np.ndarray) -> KMeans:
    """A fitted estimator of scikit-learn with given centroids."""
    model = KMeans(len(centroids), init=centroids, n_init=1, max_iter=1).fit(centroids)
    model.cluster_centers_ = np.ascontiguousarray(centroids, np.float64)
    return model


def frames() -> np.ndarray:
    """Log-mel frames of sounds that change, float32[about 4000, 80]."""
    made = []
    for number, hertz in enumerate(np.geomspace(150, 3000, 20)):
        sound = tone(2.0, hertz=hertz) * np.linspace(0.02, 1, 32_000) + 0.05 * noise(32_000, seed=number)
        made.append(log_mel_frames(sound.astype(np.float32), FRAMES))
    return np.concatenate(made)


def blobs(width: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(width)
    centres = rng.normal(0, 2, (40, width))
    return (centres[rng.integers(40, size=count)] + rng.normal(0, 1, (count, width))).astype(np.float32)


@pytest.mark.parametrize(
    "points, count",
    [(frames(), 256), (blobs(80, 5000), 100), (blobs(768, 1000), 500), (blobs(3, 3000), 1), (blobs(2, 4000), 1000)],
    ids=["log-mel", "blobs", "wide", "one", "crowded"],
)
def test_assignments_are_theirs(points, count):
    centroids = points[np.random.default_rng(0).permutation(len(points))[:count]] + np.float32(0.01)
    np.testing.assert_array_equal(nearest(points, centroids), theirs(centroids).predict(points.astype(np.float64)))


def test_the_codes_of_a_codec_are_their_assignments():
    sounds = [tone(1.0, hertz=hertz) + 0.1 * noise(16_000, seed=int(hertz)) for hertz in (200.0, 500.0, 2000.0)]
    codec = fit_residual_kmeans(sounds, ResidualKMeansConfig(levels=3, codebook_size=32))
    codes = codec.encode(sounds[1])
    rest = log_mel_frames(sounds[1], codec.config.frames) - codec.mean
    for level, centroids in zip(codes, codec.codebooks, strict=True):
        np.testing.assert_array_equal(level, theirs(centroids).predict(rest.astype(np.float64)))
        rest -= centroids[level]


@pytest.mark.parametrize(
    "points, count",
    [(frames(), 64), (frames(), 256), (blobs(80, 5000), 128), (blobs(2, 4000), 200)],
    ids=["log-mel-64", "log-mel-256", "blobs", "plane"],
)
def test_fits_are_as_good_as_theirs(points, count):
    """Within 2% of their inertia, each as it comes: greedy k-means++, one start."""
    own = fit_centroids(points, count)
    their = KMeans(count, n_init=1, random_state=0).fit(points.astype(np.float64))
    assert own.inertia <= 1.02 * their.inertia_
    found = np.square(points.astype(np.float64) - own.centroids[own.codes]).sum()
    assert own.inertia == pytest.approx(found, rel=1e-5)


def test_fits_of_separate_groups_are_as_good_as_theirs_on_the_average():
    """One start finds all groups or not, by luck: single fits of either side differ by 20%."""
    points = blobs(80, 5000)
    own = [fit_centroids(points, 40, seed=seed).inertia for seed in range(10)]
    their = [KMeans(40, n_init=1, random_state=seed).fit(points.astype(np.float64)).inertia_ for seed in range(10)]
    assert np.mean(own) <= 1.02 * np.mean(their)

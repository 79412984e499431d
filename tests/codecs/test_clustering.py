"""k-means: exact nearest centroids, fitting that leaves no centroid empty, the same whatever the threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from erniekit.codecs.clustering import fit_centroids, nearest, squared_distances

SMALL = st.floats(-100, 100, width=32)


def exact(points: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """The definition, in float64: the first of the nearest."""
    return np.stack([squared_distances(points.astype(np.float64), each) for each in centroids]).argmin(axis=0)


def distances(points: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    return ((points.astype(np.float64) - centroids) ** 2).sum(axis=1)


def blobs(seed: int, count: int = 2000, width: int = 12, around: int = 9) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres = rng.normal(0, 3, (around, width))
    return (centres[rng.integers(around, size=count)] + rng.normal(0, 1, (count, width))).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_codes_are_the_nearest_centroids(data):
    width, count = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    points = data.draw(arrays.arrays(np.float32, (data.draw(st.integers(0, 20)), width), elements=SMALL))
    centroids = data.draw(arrays.arrays(np.float32, (count, width), elements=SMALL))
    codes = nearest(points, centroids)
    assert codes.dtype == np.int32
    # equally near ones, as float64 tells them, may be told apart by what it rounds away
    np.testing.assert_array_equal(
        distances(points, centroids[codes]), distances(points, centroids[exact(points, centroids)])
    )


def test_near_ties_are_settled_exactly():
    """Far from the origin, products in float32 cannot tell the centroids apart."""
    rng = np.random.default_rng(0)
    points = (1000 + rng.normal(0, 1e-2, (500, 16))).astype(np.float32)
    np.testing.assert_array_equal(nearest(points, points[:50]), exact(points, points[:50]))


def test_codes_do_not_depend_on_what_else_is_assigned():
    points = blobs(1)
    centroids = points[:64]
    alone = np.concatenate([nearest(point[None], centroids) for point in points])
    np.testing.assert_array_equal(nearest(points, centroids), alone)


def test_fitting_finds_separate_groups():
    rng = np.random.default_rng(0)
    centres = np.array([[0, 0], [10, 0], [0, 10], [10, 10]], np.float32)
    points = np.concatenate([centre + rng.normal(0, 0.1, (100, 2)) for centre in centres]).astype(np.float32)
    found = fit_centroids(points, 4)
    assert sorted(np.round(found.centroids).astype(int).tolist()) == [[0, 0], [0, 10], [10, 0], [10, 10]]
    np.testing.assert_array_equal(np.bincount(found.codes), [100] * 4)
    assert np.isclose(found.inertia, squared_distances(points, found.centroids[found.codes]).sum())


def test_no_centroid_stays_without_points():
    """Most points are equal: means of the few others would leave many centroids on one place."""
    points = np.zeros((1000, 3), np.float32)
    points[::10] = np.random.default_rng(0).normal(0, 1, (100, 3))
    found = fit_centroids(points, 40)
    assert np.bincount(found.codes, minlength=40).min() > 0


def test_fewer_different_points_than_centroids():
    points = np.repeat(np.eye(3, dtype=np.float32), 5, axis=0)
    found = fit_centroids(points, 8)
    assert found.centroids.shape == (8, 3) and found.inertia == 0
    np.testing.assert_array_equal(found.centroids[found.codes], points)
    assert np.isfinite(fit_centroids(np.ones((1, 3), np.float32), 2).centroids).all()


def test_the_same_for_the_same_seed_and_any_threads():
    code = (
        "import numpy as np, hashlib\n"
        "from erniekit.codecs.clustering import fit_centroids\n"
        "points = np.random.default_rng(0).normal(0, 1, (2500, 80)).astype(np.float32)\n"
        "print(hashlib.sha256(fit_centroids(points, 64).centroids.tobytes()).hexdigest())"
    )
    digests = set()
    for threads in ("1", "2"):
        settings = os.environ | {"OPENBLAS_NUM_THREADS": threads, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-c", code]
        digests.add(subprocess.run(command, env=settings, capture_output=True, text=True, check=True).stdout)
    assert len(digests) == 1
    points = blobs(3)
    first = fit_centroids(points, 20, seed=7)
    np.testing.assert_array_equal(first.codes, fit_centroids(points, 20, seed=7).codes)
    assert not np.array_equal(first.codes, fit_centroids(points, 20, seed=8).codes)

"""k-means: the nearest centroid of points, and centroids fitted to points, in NumPy.

Every value that decides something is computed in an order that no number of threads changes: products of matrices only
make a short list of centroids, from which exact distances choose.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

_BLOCK_SCORES = 1 << 19  # distances of all centroids that are in memory at once
_BLOCK_VALUES = 1 << 20  # coordinates of pairs of a point and a centroid, likewise
_SEEDING_POINTS = 32  # for each centroid: of so many points the first centroids are drawn
MAX_ROUNDS = 25
TOLERANCE = 1e-4


class Clustering(NamedTuple):
    """What `fit_centroids` found.

    Attributes:
        centroids: float32[K, D].
        codes: the nearest centroid of each point, int32[N].
        inertia: the sum of squared distances of the points from their centroids.
        rounds: how often all points were assigned.
    """

    centroids: np.ndarray
    codes: np.ndarray
    inertia: float
    rounds: int


def nearest(points: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Return the nearest centroid of each point by Euclidean distance; of equally near ones the first.

    Args:
        points: float32[N, D], finite.
        centroids: float32[K, D], finite.

    Returns:
        int32[N].
    """
    points = np.ascontiguousarray(points, np.float32)
    centroids = np.ascontiguousarray(centroids, np.float32)
    count, width = centroids.shape
    half_squares = np.einsum("kd,kd->k", centroids, centroids) / 2
    found = np.empty(len(points), np.int32)
    rows = max(1, _BLOCK_SCORES // count)
    # A product of float32 vectors of D values is off by at most D rounding errors of their lengths' product.
    rounding = np.float32(2 * (width + 4)) * np.finfo(np.float32).eps
    largest = np.sqrt(2 * half_squares.max())
    for start in range(0, len(points), rows):
        block = points[start : start + rows]
        scores = half_squares - block @ centroids.T
        best = scores.argmin(axis=1)
        lengths = np.sqrt(np.einsum("nd,nd->n", block, block))
        limit = scores[np.arange(len(block)), best] + rounding * largest * (lengths + largest)
        near = scores <= limit[:, None]
        for row in np.flatnonzero(np.count_nonzero(near, axis=1) > 1):
            among = np.flatnonzero(near[row])
            best[row] = among[squared_distances(block[row].astype(np.float64), centroids[among]).argmin()]
        found[start : start + rows] = best
    return found


def squared_distances(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the squared distances of rows of two arrays, which are broadcast against each other, in their type."""
    apart = points - others
    return np.einsum("nd,nd->n", apart, apart)


def fit_centroids(points: np.ndarray, count: int, *, seed: int = 0, max_rounds: int = MAX_ROUNDS) -> Clustering:
    """Fit centroids by Lloyd's algorithm (https://doi.org/10.1109/TIT.1982.1056489).

    The first ones are drawn by greedy k-means++ (Arthur and Vassilvitskii 2007, Appendix) from some of the points. A
    centroid without points takes the place of the point that is farthest from its own; if all points lie on
    centroids, it stays where it is. Ends when the centroids together have moved by less than 1e-4 of the points'
    mean variance (squared), or after `max_rounds`.

    Args:
        points: float32[N, D], finite, at least one; there may be fewer than centroids.
        count: of centroids.
    """
    points = np.ascontiguousarray(points, np.float32)
    rng = np.random.default_rng(seed)
    some = min(len(points), _SEEDING_POINTS * count)
    centroids = _seeds(points[np.sort(rng.permutation(len(points))[:some])], count, rng)
    columns = np.ascontiguousarray(points.T)
    still = TOLERANCE * float(np.mean([column.var(dtype=np.float64) for column in columns]))
    rounds, shift = 0, math.inf
    while shift > still and rounds < max_rounds:
        rounds += 1
        codes = nearest(points, centroids)
        moved = _means(points, columns, codes, centroids)
        shift = float(squared_distances(moved, centroids).sum(dtype=np.float64))
        centroids = moved
    codes = nearest(points, centroids)
    return Clustering(centroids, codes, float(_distances(points, codes, centroids).sum(dtype=np.float64)), rounds)


def _seeds(points: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw points far from each other: each is the best of a few drawn by their squared distance from those before."""
    tries = 2 + int(np.log(count))
    chosen = [int(rng.integers(len(points)))]
    apart = squared_distances(points, points[chosen[0]])
    while len(chosen) < count:
        bounds = np.cumsum(apart, dtype=np.float64)
        drawn = np.minimum(np.searchsorted(bounds, rng.random(tries) * bounds[-1], "right"), len(points) - 1)
        nearer = [np.minimum(apart, squared_distances(points, points[index])) for index in drawn]
        best = int(np.argmin([each.sum(dtype=np.float64) for each in nearer]))
        chosen.append(int(drawn[best]))
        apart = nearer[best]
    return points[chosen]


def _means(points: np.ndarray, columns: np.ndarray, codes: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Return the means of the points of each centroid, float32[K, D]; `columns` are the points transposed."""
    count = len(centroids)
    members = np.bincount(codes, minlength=count)
    sums = np.stack([np.bincount(codes, column, count) for column in columns], axis=1)
    means = np.where(members[:, None] > 0, sums / np.maximum(members, 1)[:, None], centroids).astype(np.float32)
    empty = np.flatnonzero(members == 0)
    if len(empty):
        distances = _distances(points, codes, centroids)
        farthest = np.argsort(-distances, kind="stable")[: len(empty)]
        farthest = farthest[distances[farthest] > 0]
        means[empty[: len(farthest)]] = points[farthest]
    return means


def _distances(points: np.ndarray, codes: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Return the squared distance of each point from its centroid, float32[N]."""
    rows = max(1, _BLOCK_VALUES // points.shape[1])
    starts = range(0, len(points), rows)
    return np.concatenate(
        [squared_distances(points[at : at + rows], centroids[codes[at : at + rows]]) for at in starts]
    )

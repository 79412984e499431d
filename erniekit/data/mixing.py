"""The order of samples in an epoch over all sources, as a function of (seed, epoch) and the sources' sizes only.

First each source gets a number of samples, then the sources are interleaved.

| strategy | samples of source k in an epoch, with sizes n_k and probabilities p_k (of sum 1) |
|---|---|
| concat | n_k: everything once; probabilities are not used |
| random | p_k N, rounded so that they add up to N = min(num_samples, sum of n_k), or num_samples with repeat |
| interleave_under | p_k T with T = min(n_k / p_k): one source is used up, none repeats |
| interleave_over | p_k T with T = max(n_k / p_k): the last source is used up, the others repeat |

A source of probability 0 is left out under any strategy. A source that has to give more samples than it contains is
used completely before a sample repeats, each time in a new order. Samples may repeat until an epoch has
MAX_OVERSAMPLED_EPOCH; a mixture that needs more is rejected before anything of that size is allocated.

Shuffling permutes samples within each source and the sources among each other; without it, each source keeps its file
order and the sources are interleaved evenly in proportion.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from enum import IntEnum
from typing import cast

import numpy as np

from erniekit.data.conversation import check_probabilities
from erniekit.errors import DataError

# The random streams that shape an epoch.


class Purpose(IntEnum):
    """What a random stream is for. It comes first in every key, because NumPy pads short keys with zeros: (s, e) and
    (s, e, 0) are the same key."""

    SAMPLE_ORDER = 1
    PACK_ORDER = 2
    SEGMENTS = 3  # of interleaved speech and text; `number` is that of the source
    CODE_CHOICES = 4  # of recordings as codes: task, level, prompt, what is told; likewise
    CODE_MASKS = 5  # which of their codes are masked; likewise
    SPEAKER_ORDER = 6  # of the recordings of a speaker; `number` is that of the speaker, `epoch` that of the pass
    SPEAKER_ROUNDS = 7  # of the speakers in each round
    ON_POLICY = 8  # which steps of distillation train on the student's own answers; `epoch` is the step


def generator(purpose: Purpose, seed: int, epoch: int, number: int = 0) -> np.random.Generator:
    """Return the random generator of a purpose in an epoch; `number` distinguishes several streams of one purpose."""
    return np.random.default_rng((int(purpose), seed, epoch, number))


def uniforms(purpose: Purpose, seed: int, epoch: int, number: int, first: int, count: int) -> np.ndarray:
    """Return the numbers first <= i < first + count of a stream, as if those before had been drawn: float64[count]."""
    rng = generator(purpose, seed, epoch, number)
    cast(np.random.PCG64, rng.bit_generator).advance(first)
    return rng.random(count)


STRATEGIES = ("random", "concat", "interleave_under", "interleave_over")
MAX_OVERSAMPLED_EPOCH = 100_000_000  # about 35 bytes of memory each (measured) while they are ordered


def epoch_order(
    source_of: np.ndarray,
    probabilities: Sequence[float],
    strategy: str,
    *,
    seed: int,
    epoch: int,
    shuffle: bool,
    num_samples: int,
    repeat: bool = False,
) -> np.ndarray:
    """Return the samples of one epoch in order.

    Args:
        source_of: int[n], the source of each sample; the samples of a source are contiguous and in file order.
        probabilities: one per source, relative.
        strategy: one of STRATEGIES.
        num_samples: maximum number of samples in an epoch of the strategy "random".
        repeat: give such an epoch exactly that many, repeating samples if the data is smaller.

    Returns:
        int64[m], indices into `source_of`.

    Raises:
        DataError: the strategy is unknown, the probabilities cannot be used, or the epoch would exceed both the
            data and MAX_OVERSAMPLED_EPOCH samples.
    """
    if strategy not in STRATEGIES:
        raise DataError(f"mix_strategy {strategy!r}: expected one of {', '.join(STRATEGIES)}")
    weights = np.array(check_probabilities(probabilities))
    sizes = np.bincount(source_of, minlength=len(weights)).astype(np.int64)
    first = np.concatenate(([0], np.cumsum(sizes)))[:-1]
    counts = _counts(sizes, weights, strategy, num_samples, repeat)
    rng = generator(Purpose.SAMPLE_ORDER, seed, epoch)
    parts = [
        start + _source_order(int(size), int(count), rng if shuffle else None)
        for start, size, count in zip(first, sizes, counts, strict=True)
    ]
    joined = np.concatenate(parts)
    if shuffle:
        return joined[rng.permutation(len(joined))]
    return joined[_interleave_evenly(counts)]


def _counts(sizes: np.ndarray, weights: np.ndarray, strategy: str, num_samples: int, repeat: bool) -> np.ndarray:
    used = (weights > 0) & (sizes > 0)
    counts = np.zeros(len(sizes), np.int64)
    if strategy == "concat" or not used.any():
        counts[used] = sizes[used]
        return counts
    normalized_weights = weights[used] / weights[used].sum()
    size = sizes[used]
    if strategy == "random":
        total = num_samples if repeat else min(num_samples, int(size.sum()))
        _check_total(strategy, total, int(size.sum()))
        counts[used] = _apportion(normalized_weights, total)
        return counts
    with np.errstate(divide="ignore", over="ignore"):  # a tiny weight needs endlessly many: rejected below
        totals = size / normalized_weights
    # Rounding before floor and ceil removes the error of the division: n / p * p is n.
    if strategy == "interleave_under":
        counts[used] = np.minimum(size, np.floor(np.round(normalized_weights * totals.min(), 6)).astype(np.int64))
    else:
        _check_total(strategy, float(totals.max()), int(size.sum()))
        counts[used] = np.maximum(size, np.ceil(np.round(normalized_weights * totals.max(), 6)).astype(np.int64))
    return counts


def _check_total(strategy: str, total: float, available: int) -> None:
    limit = max(available, MAX_OVERSAMPLED_EPOCH)
    if total <= limit:
        return
    requested = f"{total:,.0f}" if total < 1e15 else f"{Decimal(total):.3g}"
    remedy = (
        f"Set num_samples_each_epoch to at most {limit:,}."
        if strategy == "random"
        else "Raise the smallest train_dataset_prob, or choose another mix_strategy."
    )
    raise DataError(
        f"mix_strategy {strategy}: an epoch would have {requested} samples, from data with {available:,}; "
        f"samples repeat up "
        f"to {MAX_OVERSAMPLED_EPOCH:,} an epoch\n  {remedy}"
    )


def _apportion(normalized_weights: np.ndarray, total: int) -> np.ndarray:
    """Return integers in proportion to `normalized_weights` that add up to `total` (largest remainder method)."""
    exact = normalized_weights * total
    counts = np.floor(exact).astype(np.int64)
    rest = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:rest]] += 1
    return counts


def _source_order(size: int, count: int, rng: np.random.Generator | None) -> np.ndarray:
    if not size:
        return np.empty(0, np.int64)
    passes = np.tile(np.arange(size, dtype=np.int64), (-(-count // size), 1))
    if rng is not None:
        rng.permuted(passes, axis=1, out=passes)
    return passes.ravel()[:count]


def _interleave_evenly(counts: np.ndarray) -> np.ndarray:
    """Return positions in the concatenated sources; sample j of m of a source is at the fraction (j + 1/2) / m."""
    fractions = np.concatenate([(np.arange(count) + 0.5) / count for count in counts if count] or [np.empty(0)])
    return np.argsort(fractions, kind="stable")

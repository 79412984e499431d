"""Micro-batches of samples of similar length, the alternative to packing: padding is bounded by a budget of tokens."""

from __future__ import annotations

import numpy as np

from erniekit.data.packing import Packs


def group_by_length(lengths: np.ndarray, budget: int, max_samples: int = 0) -> Packs:
    """Groups whose number of samples times their longest one is at most `budget`, the shortest group first.

    The longest sample left opens a group, and the next longest join it until another would exceed the budget; so only
    the group of the shortest may be smaller than it could be. Samples of one length stay in the order given.

    Args:
        lengths: int[n], each from 1 to `budget`.
        budget: positions of a group, padding included.
        max_samples: samples of a group; 0 for no limit.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    assert not len(lengths) or (lengths.min() >= 1 and lengths.max() <= budget), "lengths must be in 1..budget"
    by_length = np.argsort(lengths, kind="stable")
    ends = [len(by_length)]
    while ends[-1]:
        size = budget // int(lengths[by_length[ends[-1] - 1]])
        ends.append(max(0, ends[-1] - (min(size, max_samples) if max_samples else size)))
    return Packs(by_length, np.array(ends[::-1]))

"""The random streams that shape an epoch, one for each purpose."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What is drawn. First in every key, because NumPy pads short keys with zeros: (s, e) and (s, e, 0) are one key."""

    SAMPLE_ORDER = 1
    PACK_ORDER = 2


def generator(purpose: Purpose, seed: int, epoch: int, number: int = 0) -> np.random.Generator:
    """The stream of a purpose in an epoch; `number` tells several streams of one purpose apart."""
    return np.random.default_rng((int(purpose), seed, epoch, number))

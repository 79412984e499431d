"""Where files hold the weights of experts that they stack (`storage/stacked_tensors.py`). Needs no Paddle or NumPy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

Stacked = Mapping[str, tuple[str, ...]]
_EXPERT = re.compile(r"(?P<experts>.*\.experts\.)(?P<number>\d+)\.(?P<weight>.+)")


class Place(NamedTuple):
    """Where a weight lies in a stacked tensor: the outputs part, part + parts, ... of one expert."""

    stored: str
    expert: int
    part: int
    parts: int

    def of(self, stacked: np.ndarray) -> np.ndarray:
        """Return the weight's values in the stacked tensor, [in, out] or [out]."""
        return stacked[self.expert, ..., self.part :: self.parts]


def place_of(name: str, stacked: Stacked) -> Place | None:
    """Return the place of a weight; None: files hold it under its own name."""
    found = _EXPERT.fullmatch(name) if stacked else None
    if found is None:
        return None
    for stored, weights in stacked.items():
        if found["weight"] in weights:
            place = (int(found["number"]), weights.index(found["weight"]), len(weights))
            return Place(found["experts"] + stored, *place)
    return None

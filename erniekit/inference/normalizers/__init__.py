"""Make texts comparable before their errors are counted: the values of the parameter `text_normalizer`."""

from __future__ import annotations

import importlib
from collections.abc import Callable

Normalizer = Callable[[str], str]


def text_normalizer(name: str) -> Normalizer:
    """Return the function `normalize` of the module of this package with this name; `none` leaves texts as they are."""
    if name == "none":
        return str
    normalize: Normalizer = importlib.import_module(f"{__name__}.{name}").normalize
    return normalize

"""Make texts comparable before their errors are counted: the values of the parameter `text_normalizer`."""

from __future__ import annotations

import importlib
from collections.abc import Callable

Normalizer = Callable[[str], str]
# Name -> the module of this package with the function `normalize`.
_MODULES = {"basic": "basic", "english": "english", "chinese": "chinese"}


def text_normalizer(name: str) -> Normalizer:
    """Return the normaliser with this name; `none` returns texts as they are."""
    if name == "none":
        return str
    normalize: Normalizer = importlib.import_module(f"{__name__}.{_MODULES[name]}").normalize
    return normalize

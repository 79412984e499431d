"""Random weights, each seeded by the run's seed and its own name, so that no order of construction matters. Needs no
Paddle."""

from __future__ import annotations

import hashlib
import re

import numpy as np

from erniekit.model.configuration import ModelConfig

_NORM = re.compile(r"norm(\.\d+)?\.weight$")


def initial_weight(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int) -> np.ndarray:
    """The initial value of the weight with this Hugging Face name and shape, float32."""
    if _NORM.search(name):
        return np.ones(shape, np.float32)
    if name.endswith("bias"):  # a router's correction bias, too
        return np.zeros(shape, np.float32)
    digest = hashlib.sha256(name.encode()).digest()
    generator = np.random.Generator(np.random.PCG64([seed, int.from_bytes(digest[:8], "little")]))
    values = generator.standard_normal(shape, np.float32)
    return np.multiply(values, np.float32(config.initializer_range), out=values)

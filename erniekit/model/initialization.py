"""Random weights, each seeded by the run's seed and its own name, so that no order of construction matters."""

from __future__ import annotations

import hashlib
import re

import numpy as np
import paddle

from erniekit.model.configuration import ModelConfig
from erniekit.model.decoder import Decoder
from erniekit.model.placement import placement
from erniekit.model.weights import is_transposed, named_weights

_NORM = re.compile(r"norm(\.\d+)?\.weight$")


def initialize_weights(decoder: Decoder, seed: int) -> None:
    """Matrices normal(0, initializer_range), norm weights 1, biases 0."""
    shapes = decoder.config.weight_shapes()
    for name, parameter in named_weights(decoder).items():
        values = initial_weight(name, shapes[name], decoder.config, seed)
        values = values.T if is_transposed(name) else values
        own = decoder.tensor.cut(values, placement(name).axis)
        parameter.set_value(paddle.to_tensor(np.ascontiguousarray(own)).astype(parameter.dtype))


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

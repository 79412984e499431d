"""A decoder's random weights."""

from __future__ import annotations

import numpy as np
import paddle

from erniekit.model.decoder import Decoder
from erniekit.model.initial_weight import initial_weight
from erniekit.model.placement import placement
from erniekit.model.weights import is_transposed, named_weights, packed_weights


def initialize_weights(decoder: Decoder, seed: int) -> None:
    """Matrices normal(0, initializer_range), norm weights 1, biases 0."""
    shapes = decoder.config.weight_shapes()
    for name, parameter in named_weights(decoder).items():
        values = initial_weight(name, shapes[name], decoder.config, seed)
        values = values.T if is_transposed(name) else values
        own = decoder.tp.local_shard(values, placement(name).axis)
        parameter.set_value(paddle.to_tensor(np.ascontiguousarray(own)).astype(parameter.dtype))
    for name, weight in packed_weights(decoder).items():
        weight.fill(name, initial_weight(name, shapes[name], decoder.config, seed), decoder.tp)

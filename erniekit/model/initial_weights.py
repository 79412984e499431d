"""Random initial weights: each is seeded by the run's seed and its name, so they may be made in any order."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import paddle

from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.decoder import Decoder
from erniekit.model.normal_draws import NormalDraws
from erniekit.model.parameter_memory import allocate, place_rows
from erniekit.model.threads import parallel_map
from erniekit.model.vocabulary import as_stored, grown_values, vocabulary_weights
from erniekit.model.weights import named_weights, packed_weights

_BLOCK = 1 << 18  # values that are drawn at once


@paddle.no_grad()
def initialize_weights(decoder: Decoder, seed: int) -> None:
    """Matrices normal(0, initializer_range), norm weights what the architecture says (1), biases 0."""
    config, architecture = decoder.config, decoder.config.architecture
    shapes, grown = as_stored(config).weight_shapes(), vocabulary_weights(config)
    parameters = named_weights(decoder)
    is_linear = {name: architecture.is_linear(name) for name in parameters}  # a name without a rule ends it here

    def fill(name: str) -> None:
        parameter, transposed = parameters[name], is_linear[name]
        allocate(parameter)
        if decoder.tp.size == 1 and not (config.vocabulary is not None and name in grown):
            for rows, block in initial_blocks(name, shapes[name], config, seed):
                place_rows(parameter, rows, block, transposed=transposed)
            return
        values = initial_weight(name, shapes[name], config, seed)
        if config.vocabulary is not None and name in grown:
            values = grown_values(config.vocabulary, name, values, config.initializer_range)
        own = decoder.tp.local_shard(values.T if transposed else values, architecture.placement(name).axis)
        place_rows(parameter, slice(0, len(own)), own, transposed=False)

    # the largest first, so that the threads end together
    parallel_map(fill, sorted(parameters, key=lambda name: -math.prod(shapes[name])))
    for name, weight in packed_weights(decoder).items():
        values = initial_weight(name, shapes[name], config, seed)
        weight.fill(name, values, decoder.tp, architecture.placement(name).axis)


def initial_weight(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int) -> np.ndarray:
    """Return the initial value of the weight with this Hugging Face name and shape, float32."""
    ((_, values),) = initial_blocks(name, shape, config, seed, at_once=math.prod(shape))
    return values


def initial_blocks(
    name: str, shape: tuple[int, ...], config: ModelConfig, seed: int, at_once: int = _BLOCK
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield the rows of an initial weight in order, with their numbers; the same values whatever `at_once` is.

    An array is used again for the next rows.

    Args:
        at_once: values that are drawn at once, rounded down to rows.
    """
    initial = 0.0 if name.endswith("bias") else config.architecture.weight_info(name).rule.initial  # a router's, too
    if initial is not None:
        # what is computed is as small as the other weights, or a model from random weights hears little but positions
        scaled = initial(shape) * np.float32(config.initializer_range) if callable(initial) else initial
        yield slice(0, shape[0]), np.broadcast_to(np.asarray(scaled, np.float32), shape)
        return
    digest = hashlib.sha256(name.encode()).digest()
    draws = NormalDraws([seed, int.from_bytes(digest[:8], "little")], config.initializer_range)
    count = max(1, at_once // math.prod(shape[1:]))
    memory = np.empty((min(count, shape[0]), *shape[1:]), np.float32)
    for start in range(0, shape[0], count):
        values = memory[: shape[0] - start]
        draws.fill(values)
        yield slice(start, start + len(values)), values

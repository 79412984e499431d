"""Which weights a rank holds, and how many values of each. Needs neither Paddle nor NumPy."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from erniekit.model.placement import placement
from erniekit.model.weight_shapes import Shapes
from erniekit.parallel.stages import stage_layers
from erniekit.parallel.topology import Topology

if TYPE_CHECKING:
    from erniekit.model.configuration import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
LAYER = re.compile(r"model\.layers\.(\d+)\.")


def on_stage(shapes: Shapes, model: ModelConfig, topology: Topology, runs: list[range], stage: int) -> Shapes:
    """Those of a model's weights, or of its adapters, that belong to one pipeline stage; tied embeddings lie on the
    first and on the last one.

    Args:
        runs: the layers of each run of the pipeline, see `stages.layer_runs`.
    """
    layers = set(stage_layers(runs, stage, topology.pipeline))
    first, last = stage == 0, stage == topology.pipeline - 1

    def is_here(name: str) -> bool:
        layer = LAYER.match(name)
        if layer:
            return int(layer[1]) in layers
        if name == EMBEDDING:
            return first or (last and model.tie_word_embeddings)
        return last

    return {name: shape for name, shape in shapes.items() if is_here(name)}


def values_on_rank(shapes: Shapes, topology: Topology) -> int:
    """How many values of these weights (or adapters) one rank holds; every rank of a stage holds as many."""
    return sum(math.prod(shape) // _parts(name, topology) for name, shape in shapes.items())


def _parts(name: str, topology: Topology) -> int:
    place = placement(name)
    if place.expert is not None:
        return topology.expert
    return topology.tensor if place.axis is not None else 1

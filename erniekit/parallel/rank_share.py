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


def shapes_on_pp_stage(
    shapes: Shapes, model: ModelConfig, topology: Topology, chunks: list[range], pp_stage: int
) -> Shapes:
    """Those of a model's weights, or of its adapters, that belong to one pipeline stage; tied embeddings lie on the
    first and on the last one.

    Args:
        chunks: the layers of each run of the pipeline, see `stages.layer_runs`.
    """
    layers = set(stage_layers(chunks, pp_stage, topology.pipeline))
    first, last = pp_stage == 0, pp_stage == topology.pipeline - 1

    def is_here(name: str) -> bool:
        layer = LAYER.match(name)
        if layer:
            return int(layer[1]) in layers
        if name == EMBEDDING:
            return first or (last and model.tie_word_embeddings)
        return last

    return {name: shape for name, shape in shapes.items() if is_here(name)}


def numel_on_rank(shapes: Shapes, topology: Topology) -> int:
    """How many values of these weights (or adapters) one rank holds; every rank of a stage holds as many."""
    return sum(math.prod(shape) // _num_shards(name, topology) for name, shape in shapes.items())


def _num_shards(name: str, topology: Topology) -> int:
    weight_placement = placement(name)
    if weight_placement.expert is not None:
        return topology.expert
    return topology.tensor if weight_placement.axis is not None else 1

"""Which layers and weights each pipeline stage has, and the pipeline's bubble. Needs no Paddle or NumPy.

The stack is cut like fleet's `SegmentLayers` does; with several chunks per stage, which fleet only cuts by layers, in
the same ways. Its items are the embedding, the decoder layers, the empty layers of `add_tail_layers`, the final norm
and the head; so item i + 1 is layer i.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from erniekit.distributed.topology import SMALLEST_INTERLEAVED_PIPELINE, Topology
from erniekit.errors import ConfigurationError
from erniekit.model.architectures.architecture import Architecture
from erniekit.model.architectures.plain_decoder import EMBEDDING, Shapes
from erniekit.model.architectures.sharding import Placement

if TYPE_CHECKING:
    from erniekit.model.architectures.model_config import ModelConfig


BY_LAYER = "layer:"
DECODER_LAYER = "DecoderLayer"
DEFAULT_METHODS = (BY_LAYER + DECODER_LAYER, "layer:Ernie4_5_DecoderLayer|EmptyLayer")  # ours, and the original's
BEFORE, AFTER = 1, 2  # items around the layers: the embedding; the final norm and the head


def layer_chunks(
    layers: int, topology: Topology, *, method: str | tuple[int, ...] = BY_LAYER + DECODER_LAYER, tail: int = 0
) -> list[range]:
    """Return the decoder layers of each model chunk, in order; chunk c belongs to stage c % pipeline.

    The first chunk also has the embedding, and the last one the final norm and the head. A chunk may have no layers.

    Args:
        layers: number of decoder layers of the model.
        method: `pp_seg_method`: "uniform", "layer:NAME" or the first item of each chunk.
        tail: `add_tail_layers`.

    Raises:
        ConfigurationError: the stack cannot be cut this way.
    """
    bounds = _bounds(layers, topology, method, tail)
    return [range(min(max(first - BEFORE, 0), layers), min(end - BEFORE, layers)) for first, end in pairwise(bounds)]


def stage_layers(chunks: list[range], pp_stage: int, pipeline: int) -> list[int]:
    """Return the indices of the layers of a stage, over all its chunks."""
    return [layer for chunk in chunks[pp_stage::pipeline] for layer in chunk]


def _bounds(layers: int, topology: Topology, method: str | tuple[int, ...], tail: int) -> list[int]:
    """Return the first item of each chunk, and the number of items."""
    items, chunks = BEFORE + layers + tail + AFTER, topology.pipeline * topology.virtual_pipeline
    if chunks == 1:
        return [0, items]
    if falls_back_to_uniform(layers, topology, method, tail):
        return _uniform(items, chunks)
    if isinstance(method, str) and method.startswith(BY_LAYER):
        return _by_layer(layers, topology, method.removeprefix(BY_LAYER), tail, items)
    if isinstance(method, str):
        _refuse_too_few_items(items, chunks)
        _refuse_chunks_without_layers(layers, topology)
        return _uniform(items, chunks)
    bounds = [*method, items] if len(method) == chunks else list(method)
    if bounds[-1] != items or bounds[-2] > items - AFTER:
        raise ConfigurationError(
            f"pp_seg_method {_shown(method)}: the stack has {items} items: the embedding, {layers} layers, "
            f"{f'{tail} empty layers, ' if tail else ''}the final norm and the head\n  The list ends at {items}, which "
            f"may be left out, and the last stage begins at {items - AFTER} or before: norm and head stay together."
        )
    return bounds


def falls_back_to_uniform(layers: int, topology: Topology, method: str | tuple[int, ...], tail: int) -> bool:
    """Return whether a default method means "uniform", as in the original: where layers cannot be divided equally.

    Not in interleaved pipelines, in which unequal chunks wait for each other many times a step.
    """
    if method not in DEFAULT_METHODS or topology.virtual_pipeline > 1:
        return False
    return (layers + tail) % topology.pipeline != 0 and BEFORE + layers + tail + AFTER >= AFTER * topology.pipeline


def _by_layer(layers: int, topology: Topology, name: str, tail: int, items: int) -> list[int]:
    """Cut into equal numbers of layers, including empty ones; other items stay with the layer before them."""
    chunks = topology.pipeline * topology.virtual_pipeline
    if not any(word.strip().endswith(DECODER_LAYER) for word in name.split("|")):  # a family's prefix may precede it
        raise ConfigurationError(
            f"pp_seg_method {BY_LAYER}{name}: there is no such layer\n  Write {BY_LAYER}{DECODER_LAYER}."
        )
    counted = range(BEFORE, BEFORE + layers + tail)
    if len(counted) % chunks:
        raise ConfigurationError(_not_divisible(layers, topology, tail))
    _refuse_chunks_without_layers(layers, topology)
    size = len(counted) // chunks
    return [0, *(counted[chunk * size - 1] + 1 for chunk in range(1, chunks)), items]


def _uniform(items: int, chunks: int) -> list[int]:
    """Cut into numbers of items as equal as possible, the longer stages last."""
    size, longer = divmod(items, chunks)
    bounds = [0]
    for chunk in range(chunks):
        bounds.append(bounds[-1] + size + (chunk >= chunks - longer))
    return bounds


def _refuse_too_few_items(items: int, chunks: int) -> None:
    if items < AFTER * chunks:
        raise ConfigurationError(f"pp_seg_method uniform: {items} items are too few for {chunks} stages")


MOST_EMPTY_CHUNKS = 1_000  # which `add_tail_layers` may fill with empty layers; every chunk is planned


def _refuse_chunks_without_layers(layers: int, topology: Topology) -> None:
    """Raise ConfigurationError for a stack of empty layers; the embedding, and norm with head, may stand alone."""
    chunks = topology.pipeline * topology.virtual_pipeline
    if chunks > layers + AFTER + MOST_EMPTY_CHUNKS:
        raise ConfigurationError(
            f"{chunks:,} model chunks (pipeline_parallel_degree x virtual_pp_degree) are too many for {layers:,} "
            f"layers\n  write pipeline_parallel_degree: {max(1, layers // topology.virtual_pipeline)} or less"
        )


def _not_divisible(layers: int, topology: Topology, tail: int) -> str:
    chunks = topology.pipeline * topology.virtual_pipeline
    virtual = f" x virtual_pp_degree {topology.virtual_pipeline}" if topology.virtual_pipeline > 1 else ""
    empty = f" and {tail} empty ones" if tail else ""
    lines = [
        f"{layers} layers{empty} cannot be divided equally: pipeline_parallel_degree {topology.pipeline}{virtual} = "
        f"{chunks} model chunks"
    ]
    instead = []
    missing = -layers % chunks
    if missing < (layers + missing) // chunks:  # so that no chunk has only empty layers
        instead.append(f"add_tail_layers: {missing}")
    interleaved = topology.virtual_pipeline > 1
    degrees = range(SMALLEST_INTERLEAVED_PIPELINE if interleaved else 1, layers + 1)
    fitting = [str(degree) for degree in degrees if (layers + tail) % (degree * topology.virtual_pipeline) == 0]
    if fitting:
        instead.append(f"{'one of ' if len(fitting) > 1 else ''}pipeline_parallel_degree: {', '.join(fitting)}")
    if interleaved and (layers + tail) % topology.pipeline == 0:
        instead.append("virtual_pp_degree: 1")
    instead.append("pp_seg_method: uniform")
    instead.append(f"a list of the first item of each {'chunk' if interleaved else 'stage'} as pp_seg_method")
    return "\n".join([*lines, "  write " + "\n  or ".join(instead)])


def _shown(method: str | tuple[int, ...]) -> str:
    return method if isinstance(method, str) else f"[{', '.join(map(str, method))}]"


# Consequences of the order in which stages work: the bubble, and the micro-batches in flight. 1F1B: Narayanan et al.,
# 2021, arXiv:2104.04473, section 2.2.


def bubble_fraction(topology: Topology, micro_batches: int) -> float:
    """Return the fraction of a step in which a stage waits, (p - 1) / (m v + p - 1), if every chunk takes equally long.

    p stages, v model chunks per stage, m micro-batches per step.
    """
    waiting = topology.pipeline - 1
    return waiting / (micro_batches * topology.virtual_pipeline + waiting)


def chunks_in_flight(topology: Topology, pp_stage: int, micro_batches: int) -> int:
    """Return the maximum number of passes through a stage's chunks that are between forward and backward.

    Without interleaving a chunk is all of the stage's layers, so this is a number of micro-batches.
    """
    num_stages, chunks = topology.pipeline, topology.virtual_pipeline
    stages_after = num_stages - pp_stage - 1
    if chunks == 1:
        return min(micro_batches, stages_after + 1)
    if micro_batches <= num_stages:  # fleet then runs all forward passes first
        return num_stages * chunks
    return min(max(micro_batches, 2 * num_stages) * chunks, 2 * stages_after + (chunks - 1) * num_stages + 1)


# Which weights a rank has, and how many values.


def shapes_on_pp_stage(
    shapes: Shapes, model: ModelConfig, topology: Topology, chunks: list[range], pp_stage: int
) -> Shapes:
    """Those of a model's weights, or of its adapters, that belong to one pipeline stage; towers lie on the first
    one, tied embeddings on the first and on the last one.

    Args:
        chunks: the layers of each model chunk, see `layer_chunks`.
    """
    layers = set(stage_layers(chunks, pp_stage, topology.pipeline))
    first, last = pp_stage == 0, pp_stage == topology.pipeline - 1

    def is_here(name: str) -> bool:
        weight = model.architecture.weight_info(name)
        if weight.layer is not None:
            return weight.layer in layers
        if weight.in_tower:
            return first
        if name.rpartition(".")[0] == model.architecture.file_name(EMBEDDING).rpartition(".")[0]:  # or its new rows
            return first or (last and model.ties_head)
        return last

    return {name: shape for name, shape in shapes.items() if is_here(name)}


def numel_on_rank(shapes: Shapes, architecture: Architecture, topology: Topology) -> int:
    """Return the number of values of these weights (or adapters) on one rank; it is the same on
    every rank of a stage."""
    return sum(
        math.prod(shape) // _num_shards(architecture.placement(name), topology) for name, shape in shapes.items()
    )


def _num_shards(weight_placement: Placement, topology: Topology) -> int:
    if weight_placement.expert is not None:
        return topology.expert
    return topology.tensor if weight_placement.axis is not None else 1

"""Which layers each stage of a pipeline has. Needs neither Paddle nor NumPy.

The stack is cut as fleet's `SegmentLayers` cuts it; where stages have several runs, which fleet cuts by layers only, in
the same ways. Its items are the embedding, the decoder layers, the empty layers of `add_tail_layers`, the final norm
and the head; so item i + 1 is layer i.
"""

from __future__ import annotations

from itertools import pairwise

from erniekit.errors import ConfigurationError
from erniekit.parallel.topology import SMALLEST_INTERLEAVED_PIPELINE, Topology

BY_LAYER = "layer:"
DECODER_LAYER = "DecoderLayer"
BEFORE, AFTER = 1, 2  # items around the layers: the embedding; the final norm and the head


def layer_chunks(
    layers: int, topology: Topology, *, method: str | tuple[int, ...] = BY_LAYER + DECODER_LAYER, tail: int = 0
) -> list[range]:
    """The decoder layers of each run of the pipeline, in their order; run r belongs to stage r % pipeline.

    The first run has the embedding as well, and the last one the final norm and the head. A run may have no layers.

    Args:
        layers: how many decoder layers the model has.
        method: `pp_seg_method`: "uniform", "layer:NAME" or the first item of each run.
        tail: `add_tail_layers`.

    Raises:
        ConfigurationError: the stack cannot be cut so.
    """
    bounds = _bounds(layers, topology, method, tail)
    return [range(min(max(first - BEFORE, 0), layers), min(end - BEFORE, layers)) for first, end in pairwise(bounds)]


def stage_layers(chunks: list[range], pp_stage: int, pipeline: int) -> list[int]:
    """The numbers of the layers of a stage, over all its runs."""
    return [layer for chunk in chunks[pp_stage::pipeline] for layer in chunk]


def _bounds(layers: int, topology: Topology, method: str | tuple[int, ...], tail: int) -> list[int]:
    """The first item of each run, and the number of items."""
    items, chunks = BEFORE + layers + tail + AFTER, topology.pipeline * topology.virtual_pipeline
    if chunks == 1:
        return [0, items]
    if isinstance(method, str) and method.startswith(BY_LAYER):
        return _by_layer(layers, topology, method.removeprefix(BY_LAYER), tail, items)
    if isinstance(method, str):
        return _uniform(items, chunks)
    bounds = [*method, items] if len(method) == chunks else list(method)
    if bounds[-1] != items or bounds[-2] > items - AFTER:
        raise ConfigurationError(
            f"pp_seg_method {_shown(method)}: the stack has {items} items: the embedding, {layers} layers, "
            f"{f'{tail} empty layers, ' if tail else ''}the final norm and the head\n  The list ends at {items}, which "
            f"may be left out, and the last stage begins at {items - AFTER} or before: norm and head stay together."
        )
    return bounds


def _by_layer(layers: int, topology: Topology, name: str, tail: int, items: int) -> list[int]:
    """Equal numbers of layers, empty ones included; what lies between stays with the layer before it."""
    chunks = topology.pipeline * topology.virtual_pipeline
    if not any(
        word.strip().endswith(DECODER_LAYER) for word in name.split("|")
    ):  # a family's prefix may stand before it
        raise ConfigurationError(
            f"pp_seg_method {BY_LAYER}{name}: no layer is called so\n  Write {BY_LAYER}{DECODER_LAYER}."
        )
    counted = range(BEFORE, BEFORE + layers + tail)
    if len(counted) % chunks:
        raise ConfigurationError(_not_divisible(layers, topology, tail))
    size = len(counted) // chunks
    return [0, *(counted[chunk * size - 1] + 1 for chunk in range(1, chunks)), items]


def _uniform(items: int, chunks: int) -> list[int]:
    """As equal numbers of items as there can be, the longer stages last."""
    if items < AFTER * chunks:
        raise ConfigurationError(f"pp_seg_method uniform: {items} items are too few for {chunks} stages")
    size, longer = divmod(items, chunks)
    bounds = [0]
    for chunk in range(chunks):
        bounds.append(bounds[-1] + size + (chunk >= chunks - longer))
    return bounds


def _not_divisible(layers: int, topology: Topology, tail: int) -> str:
    chunks = topology.pipeline * topology.virtual_pipeline
    virtual = f" x virtual_pp_degree {topology.virtual_pipeline}" if topology.virtual_pipeline > 1 else ""
    empty = f" and {tail} empty ones" if tail else ""
    lines = [
        f"{layers} layers{empty} cannot be divided equally: pipeline_parallel_degree {topology.pipeline}{virtual} = "
        f"{chunks} runs of layers"
    ]
    instead = []
    missing = -layers % chunks
    if missing < (layers + missing) // chunks:  # so that no run holds empty layers only
        instead.append(f"add_tail_layers: {missing}")
    interleaved = topology.virtual_pipeline > 1
    degrees = range(SMALLEST_INTERLEAVED_PIPELINE if interleaved else 1, layers + 1)
    fitting = [str(degree) for degree in degrees if (layers + tail) % (degree * topology.virtual_pipeline) == 0]
    if fitting:
        instead.append(f"{'one of ' if len(fitting) > 1 else ''}pipeline_parallel_degree: {', '.join(fitting)}")
    if interleaved and (layers + tail) % topology.pipeline == 0:
        instead.append("virtual_pp_degree: 1")
    instead.append(f"a list of the first item of each {'run' if interleaved else 'stage'} as pp_seg_method")
    return "\n".join([*lines, "  write " + "\n  or ".join(instead)])


def _shown(method: str | tuple[int, ...]) -> str:
    return method if isinstance(method, str) else f"[{', '.join(map(str, method))}]"

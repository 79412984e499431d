"""Compute the bytes that a rank sends in an optimizer step from the model's shape and the layout.

Counted as the ring algorithms send them, and as `tools/bench/communication.py` counts them on CPU ranks: each of n
ranks sends (n - 1) / n of the data that is gathered, scattered or exchanged, and twice that for an all-reduce. T tokens
of a micro-batch, H hidden size. Needs no Paddle or NumPy.
"""

from __future__ import annotations

import math

from erniekit.distributed.planning.memory import Workload, trained_shapes
from erniekit.distributed.stages import layer_chunks, numel_on_rank, shapes_on_pp_stage, stage_layers
from erniekit.distributed.topology import Topology
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.plain_decoder import EMBEDDING, Shapes

LOSS_NUMBERS = 3  # exchanged per token: the largest logit, the sum of exponentials, the label's logit


def step_bytes(
    model: ModelConfig, work: Workload, topology: Topology, chunks: list[range] | None = None, pp_stage: int = 0
) -> dict[str, int]:
    """Return the bytes that each rank of a pipeline stage sends in a step, by the axis of the group.

    `experts` counts dispatch between the ranks that share them, with tokens spread evenly over experts.
    """
    chunks = chunks or layer_chunks(model.num_hidden_layers, topology)
    shapes = model.weight_shapes()
    weights = shapes_on_pp_stage(shapes, model, topology, chunks, pp_stage)
    trained = shapes_on_pp_stage(trained_shapes(model, work), model, topology, chunks, pp_stage)
    sent = {
        "tensor": _tensor(model, work, topology, chunks, pp_stage, trained),
        "experts": _experts(model, work, topology, chunks, pp_stage),
        "pipeline": _pipeline(model, work, topology, pp_stage, trained),
        "sharding": _sharding(model, work, topology, weights, trained),
        "data": _data(model, work, topology, trained),
    }
    return {axis: int(size) for axis, size in sent.items()}


def _ring_fraction(ranks: int) -> float:
    return (ranks - 1) / ranks


def _passes(work: Workload, layer: int, *granularities: str) -> int:
    """Return 2 for forward and backward, or 3 if one of these granularities recomputes the layer."""
    is_recomputed = work.recompute and work.recompute_granularity in granularities and layer >= work.no_recompute_layers
    return 3 if is_recomputed else 2


def _tensor(
    model: ModelConfig, work: Workload, topology: Topology, chunks: list[range], pp_stage: int, trained: Shapes
) -> float:
    """Count two blocks per layer, each with an all-reduce of hidden states in every pass; routed experts are not such a
    block."""
    hidden = work.tokens * model.hidden_size * work.formats.activations
    blocks = 0
    for layer in stage_layers(chunks, pp_stage, topology.pipeline):
        mlp = not model.is_moe_layer(layer) or model.architecture.shared_experts_size(model) > 0
        blocks += _passes(work, layer, "full", "full_attn") + mlp * _passes(work, layer, "full")
    last = pp_stage == topology.pipeline - 1
    blocks += (pp_stage == 0) + last  # after the embedding, and before the head
    loss = LOSS_NUMBERS * 4 * work.tokens * last
    placements = {
        name: model.architecture.placement(name, sequence_parallel=topology.sequence_parallel) for name in trained
    }
    partial = {
        name: shape for name, shape in trained.items() if placements[name].partial and placements[name].expert is None
    }
    gradients = sum(math.prod(shape) for shape in partial.values()) * work.formats.gradients
    return 2 * _ring_fraction(topology.tensor) * (work.accumulation * (blocks * hidden + loss) + gradients)


def _experts(model: ModelConfig, work: Workload, topology: Topology, chunks: list[range], pp_stage: int) -> float:
    """Count rows sent to the ranks of a token's experts and back, in every pass; or an all-reduce if all ranks have all
    tokens."""
    layers = stage_layers(chunks, pp_stage, topology.pipeline)
    passes = sum(_passes(work, layer, "full") for layer in layers if model.is_moe_layer(layer))
    if topology.expert_axis == "tensor" and not topology.sequence_parallel:
        hidden = work.tokens * model.hidden_size * work.formats.activations
        return 2 * _ring_fraction(topology.expert) * work.accumulation * passes * hidden
    own = work.tokens // (topology.tensor if topology.expert_axis == "tensor" else 1)
    rows = own * model.moe_k * model.hidden_size * work.formats.activations
    return 2 * _ring_fraction(topology.expert) * work.accumulation * passes * rows


def _pipeline(model: ModelConfig, work: Workload, topology: Topology, pp_stage: int, trained: Shapes) -> float:
    """Count hidden states sent to the next model chunk, gradients to the previous one, and the sum
    of tied embeddings."""
    if topology.pipeline == 1:
        return 0
    own = work.tokens // (topology.tensor if topology.sequence_parallel else 1)
    hidden = own * model.hidden_size * work.formats.activations
    first, last = pp_stage == 0, pp_stage == topology.pipeline - 1
    forward = topology.virtual_pipeline - last  # the last chunk sends nothing forward
    backward = topology.virtual_pipeline - first
    sent = work.accumulation * (forward + backward) * hidden
    embedding = model.architecture.file_name(EMBEDDING)
    if model.ties_head and (first or last) and embedding in trained:
        copies = numel_on_rank({embedding: trained[embedding]}, model.architecture, topology)
        sent += copies * work.formats.gradients  # 2 (n - 1) / n of two ranks
    return sent


def _sharding(model: ModelConfig, work: Workload, topology: Topology, weights: Shapes, trained: Shapes) -> float:
    """Count gradients sent to the ranks that update them, and new values back; in stage 3 all values before every pass.

    Stages 2 and 3 keep no full gradients, so those of every micro-batch are sent.
    """
    values = numel_on_rank(trained, model.architecture, topology)
    gradients, new = values * work.formats.gradients, values * work.formats.weights
    if work.sharding >= 2:
        gradients *= work.accumulation
    if work.sharding == 3:
        gathered = 2 * work.accumulation * numel_on_rank(weights, model.architecture, topology) * work.formats.weights
        return _ring_fraction(topology.sharding) * (gathered + gradients)
    return _ring_fraction(topology.sharding) * (gradients + new)


def _data(model: ModelConfig, work: Workload, topology: Topology, trained: Shapes) -> float:
    """Count an all-reduce of the gradients on a rank; experts sharded over the data ranks need none."""
    own = trained
    if topology.expert_axis == "data":
        own = {name: shape for name, shape in trained.items() if model.architecture.placement(name).expert is None}
    values = numel_on_rank(own, model.architecture, topology) // (topology.sharding if work.sharding >= 2 else 1)
    return 2 * _ring_fraction(topology.data) * values * work.formats.gradients

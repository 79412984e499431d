"""How many bytes a rank sends in one optimizer step, from the model's shape and the layout alone.

Counted as the ring algorithms send them, and as `tools/bench/communication.py` counts them on CPU ranks: of n ranks
each sends (n - 1) / n of what is gathered, scattered or exchanged, and twice that for an all-reduce. T tokens of a
micro-batch, H hidden size. Needs neither Paddle nor NumPy.
"""

from __future__ import annotations

import math

from erniekit.distributed.planning.memory import Workload
from erniekit.distributed.stages import EMBEDDING, layer_chunks, numel_on_rank, shapes_on_pp_stage, stage_layers
from erniekit.distributed.topology import Topology
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.architectures.sharding import placement
from erniekit.model.architectures.weights import Shapes
from erniekit.model.lora.config import adapter_shapes

LOSS_NUMBERS = 3  # that ranks exchange for each token: the largest logit, the sum of exponentials, the label's logit


def step_bytes(
    model: ModelConfig, work: Workload, topology: Topology, chunks: list[range] | None = None, pp_stage: int = 0
) -> dict[str, int]:
    """Bytes that each rank of a pipeline stage sends in a step, by the axis of the group; `experts` between the ranks
    that divide them. Tokens spread evenly over experts."""
    chunks = chunks or layer_chunks(model.num_hidden_layers, topology)
    shapes = model.weight_shapes()
    weights = shapes_on_pp_stage(shapes, model, topology, chunks, pp_stage)
    trained = weights
    if work.adapters is not None:
        trained = shapes_on_pp_stage(adapter_shapes(shapes, work.adapters), model, topology, chunks, pp_stage)
    sent = {
        "tensor": _tensor(model, work, topology, chunks, pp_stage, trained),
        "experts": _experts(model, work, topology, chunks, pp_stage),
        "pipeline": _pipeline(model, work, topology, pp_stage, trained),
        "sharding": _sharding(work, topology, weights, trained),
        "data": _data(work, topology, trained),
    }
    return {axis: int(size) for axis, size in sent.items()}


def _ring_fraction(ranks: int) -> float:
    return (ranks - 1) / ranks


def _passes(work: Workload, layer: int, *granularities: str) -> int:
    """Forward and backward, and forward once more where one of these granularities computes a layer again."""
    is_recomputed = work.recompute and work.recompute_granularity in granularities and layer >= work.no_recompute_layers
    return 3 if is_recomputed else 2


def _tensor(
    model: ModelConfig, work: Workload, topology: Topology, chunks: list[range], pp_stage: int, trained: Shapes
) -> float:
    """Two blocks in a layer, each with a sum of hidden states in every pass; routed experts are no such block."""
    hidden = work.tokens * model.hidden_size * work.formats.activations
    blocks = 0
    for layer in stage_layers(chunks, pp_stage, topology.pipeline):
        mlp = not model.is_moe_layer(layer) or model.moe_num_shared_experts > 0
        blocks += _passes(work, layer, "full", "full_attn") + mlp * _passes(work, layer, "full")
    last = pp_stage == topology.pipeline - 1
    blocks += (pp_stage == 0) + last  # behind the embedding; before the head
    loss = LOSS_NUMBERS * 4 * work.tokens * last
    placements = {name: placement(name, sequence_parallel=topology.sequence_parallel) for name in trained}
    partial = {
        name: shape for name, shape in trained.items() if placements[name].partial and placements[name].expert is None
    }
    gradients = sum(math.prod(shape) for shape in partial.values()) * work.formats.gradients
    return 2 * _ring_fraction(topology.tensor) * (work.accumulation * (blocks * hidden + loss) + gradients)


def _experts(model: ModelConfig, work: Workload, topology: Topology, chunks: list[range], pp_stage: int) -> float:
    """To the ranks of a token's experts and back, in every pass; a sum of results where all ranks have all tokens."""
    layers = stage_layers(chunks, pp_stage, topology.pipeline)
    passes = sum(_passes(work, layer, "full") for layer in layers if model.is_moe_layer(layer))
    if topology.expert_axis == "tensor" and not topology.sequence_parallel:
        hidden = work.tokens * model.hidden_size * work.formats.activations
        return 2 * _ring_fraction(topology.expert) * work.accumulation * passes * hidden
    own = work.tokens // (topology.tensor if topology.expert_axis == "tensor" else 1)
    rows = own * model.moe_k * model.hidden_size * work.formats.activations
    return 2 * _ring_fraction(topology.expert) * work.accumulation * passes * rows


def _pipeline(model: ModelConfig, work: Workload, topology: Topology, pp_stage: int, trained: Shapes) -> float:
    """Hidden states to the next run of layers, their gradients to the one before; the sum of tied embeddings."""
    if topology.pipeline == 1:
        return 0
    own = work.tokens // (topology.tensor if topology.sequence_parallel else 1)
    hidden = own * model.hidden_size * work.formats.activations
    first, last = pp_stage == 0, pp_stage == topology.pipeline - 1
    forward = topology.virtual_pipeline - last  # the last run of all sends nothing on
    backward = topology.virtual_pipeline - first
    sent = work.accumulation * (forward + backward) * hidden
    if model.tie_word_embeddings and (first or last) and EMBEDDING in trained:
        copies = numel_on_rank({EMBEDDING: trained[EMBEDDING]}, topology)
        sent += copies * work.formats.gradients  # 2 (n - 1) / n of two ranks
    return sent


def _sharding(work: Workload, topology: Topology, weights: Shapes, trained: Shapes) -> float:
    """Gradients to the ranks that update them, and new values back; in stage 3 all values before every pass. Stages 2
    and 3 keep no whole gradients, so those of every micro-batch are sent."""
    values = numel_on_rank(trained, topology)
    gradients, new = values * work.formats.gradients, values * work.formats.weights
    if work.sharding >= 2:
        gradients *= work.accumulation
    if work.sharding == 3:
        gathered = 2 * work.accumulation * numel_on_rank(weights, topology) * work.formats.weights
        return _ring_fraction(topology.sharding) * (gathered + gradients)
    return _ring_fraction(topology.sharding) * (gradients + new)


def _data(work: Workload, topology: Topology, trained: Shapes) -> float:
    """An all-reduce of what a rank trains; experts that the data ranks divide have theirs already."""
    own = trained
    if topology.expert_axis == "data":
        own = {name: shape for name, shape in trained.items() if placement(name).expert is None}
    values = numel_on_rank(own, topology) // (topology.sharding if work.sharding >= 2 else 1)
    return 2 * _ring_fraction(topology.data) * values * work.formats.gradients

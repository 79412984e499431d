"""Simulate a step of a pipeline: which stage processes which micro-batch when, if only computing takes time.

The orders are those of 1F1B and of the interleaved schedule (Narayanan et al., 2021, arXiv:2104.04473, section 2.2), as
fleet runs them. Needs no Paddle or NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from erniekit.distributed.planning.encoder_memory import encoder_cost
from erniekit.distributed.stages import bubble_fraction
from erniekit.distributed.topology import Topology
from erniekit.model.architectures.model_config import ModelConfig


class ChunkPass(NamedTuple):
    """One pass of a micro-batch through a model chunk."""

    backward: bool
    chunk: int  # index among all chunks of the pipeline, in the order of the layers
    micro_batch: int


class Timeline(NamedTuple):
    """A simulated step, in the unit of the costs."""

    length: float
    busy: list[float]  # of each stage
    in_flight: list[int]  # maximum number of micro-batches per stage that are between forward and backward

    @property
    def bubble(self) -> float:
        """The fraction of the stages' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.length)


def chunk_costs(model: ModelConfig, chunks: Sequence[range]) -> list[float]:
    """Return the cost per token of each model chunk: the weights it is multiplied with, including its experts and the
    head, and in the first one an encoder, as often as it has states for a token.

    Attention's products are left out, because they depend on the length of documents.
    """
    layers = [0.0] * model.num_hidden_layers
    for name, shape in model.weight_shapes().items():
        weight = model.architecture.weight_info(name)
        if weight.layer is not None and len(shape) == 2:
            share = model.moe_k / model.moe_num_experts if weight.expert is not None else 1.0
            layers[weight.layer] += math.prod(shape) * share
    costs = [sum(layers[layer] for layer in chunk) for chunk in chunks]
    costs[-1] += model.vocab_size * model.hidden_size
    costs[0] += encoder_cost(model)
    return costs


MOST_SIMULATED = 30_000  # passes, a fifth of a second


def bubble(topology: Topology, micro_batches: int, costs: Sequence[float], *, backward: float = 2.0) -> float:
    """Return the fraction of a step in which stages wait, in time that does not grow with the micro-batches.

    Once all stages are busy, each further round of micro-batches takes as long as the slowest stage takes for it. So a
    few rounds are simulated, and the others are added.

    Args:
        costs: see `simulate`.
    """
    stages = topology.pipeline
    if stages == 1:
        return 0.0
    passes = 2 * stages * topology.virtual_pipeline  # of a micro-batch
    most = MOST_SIMULATED // passes // stages * stages
    if most < 2 * stages:  # hundreds of stages, whose chunks can hardly differ
        return bubble_fraction(topology, micro_batches)
    simulated = micro_batches if micro_batches <= most else most - stages + micro_batches % stages
    timeline = simulate(topology, simulated, costs, backward=backward)
    more = micro_batches / simulated
    length = timeline.length + (more - 1) * max(timeline.busy)
    return 1 - more * sum(timeline.busy) / (len(timeline.busy) * length)


def simulate(topology: Topology, micro_batches: int, costs: Sequence[float], *, backward: float = 2.0) -> Timeline:
    """Simulate a step, pass by pass.

    Args:
        costs: forward time of one micro-batch through each of the pipeline x virtual_pipeline chunks.
        backward: backward time relative to forward; 3 if layers are recomputed.
    """
    orders = [_order(topology, pp_stage, micro_batches) for pp_stage in range(topology.pipeline)]
    done: dict[ChunkPass, float] = {}
    clock, position = [0.0] * topology.pipeline, [0] * topology.pipeline
    in_flight, peak = [0] * topology.pipeline, [0] * topology.pipeline
    while any(index < len(order) for index, order in zip(position, orders, strict=True)):
        before = sum(position)
        for pp_stage, order in enumerate(orders):
            while position[pp_stage] < len(order):
                work = order[position[pp_stage]]
                dependency = _dependency(work, len(costs))
                if dependency is not None and dependency not in done:
                    break
                start = max(clock[pp_stage], 0.0 if dependency is None else done[dependency])
                clock[pp_stage] = done[work] = start + costs[work.chunk] * (backward if work.backward else 1.0)
                in_flight[pp_stage] += -1 if work.backward else 1
                peak[pp_stage] = max(peak[pp_stage], in_flight[pp_stage])
                position[pp_stage] += 1
        assert sum(position) > before, "the orders wait for each other"
    busy = [sum(costs[work.chunk] * (backward if work.backward else 1.0) for work in order) for order in orders]
    return Timeline(max(clock), busy, peak)


def _dependency(work: ChunkPass, chunks: int) -> ChunkPass | None:
    """Return the pass that must be complete first, on this or another stage."""
    if not work.backward:
        return ChunkPass(False, work.chunk - 1, work.micro_batch) if work.chunk else None
    last = work.chunk == chunks - 1
    return ChunkPass(not last, work.chunk if last else work.chunk + 1, work.micro_batch)


def _order(topology: Topology, pp_stage: int, micro_batches: int) -> list[ChunkPass]:
    """Return the passes of a stage in order: forward only, then one forward and one backward, then backward only."""
    num_stages, chunks = topology.pipeline, topology.virtual_pipeline
    stages_after = num_stages - pp_stage - 1
    count, ahead = micro_batches, stages_after
    if chunks > 1:
        count = -(-micro_batches // num_stages) * num_stages  # rounds of as many micro-batches as stages
        ahead = count * chunks if count == num_stages else 2 * stages_after + (chunks - 1) * num_stages
    total = count * chunks
    ahead = min(total, ahead)

    def work(number: int, *, backward: bool) -> ChunkPass:
        if chunks == 1:
            return ChunkPass(backward, pp_stage, number)
        own = number // num_stages % chunks
        own = chunks - 1 - own if backward else own
        return ChunkPass(
            backward, own * num_stages + pp_stage, number // (num_stages * chunks) * num_stages + number % num_stages
        )

    order = [work(number, backward=False) for number in range(ahead)]
    for number in range(total):
        if ahead + number < total:
            order.append(work(ahead + number, backward=False))
        order.append(work(number, backward=True))
    return order

"""A pipeline's step played through: when each stage works on which micro-batch, if nothing but computing takes time.

The orders are those of 1F1B and of the interleaved schedule (Narayanan et al., 2021, arXiv:2104.04473, section 2.2), as
fleet runs them. Needs neither Paddle nor NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from erniekit.model.configuration import ModelConfig
from erniekit.model.placement import placement
from erniekit.parallel.rank_share import LAYER
from erniekit.parallel.topology import Topology


class Work(NamedTuple):
    """One pass of a micro-batch through a run of layers."""

    backward: bool
    run: int  # of all runs of the pipeline, in the order of the layers
    micro_batch: int


class Timeline(NamedTuple):
    """A step, in the unit of the costs."""

    length: float
    busy: list[float]  # of each stage
    held: list[int]  # micro-batches in each stage's runs that have gone forward and not yet back, at most

    @property
    def waiting(self) -> float:
        """The share of all stages' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.length)


def run_costs(model: ModelConfig, runs: Sequence[range]) -> list[float]:
    """What each run of layers costs a token: the weights it is multiplied with, those of its experts and of the head
    included. Attention's own products are left out, for they depend on the length of documents."""
    layers = [0.0] * model.num_hidden_layers
    for name, shape in model.weight_shapes().items():
        layer = LAYER.match(name)
        if layer and len(shape) == 2:
            share = model.moe_k / model.moe_num_experts if placement(name).expert is not None else 1.0
            layers[int(layer[1])] += math.prod(shape) * share
    costs = [sum(layers[layer] for layer in run) for run in runs]
    costs[-1] += model.vocab_size * model.hidden_size
    return costs


def simulate(topology: Topology, micro_batches: int, costs: Sequence[float], *, backward: float = 2.0) -> Timeline:
    """Play a step through.

    Args:
        costs: the time that one micro-batch takes forward through each run of layers, pipeline x virtual_pipeline.
        backward: how many times as long it takes backward; 3 where layers are computed again.
    """
    orders = [_order(topology, stage, micro_batches) for stage in range(topology.pipeline)]
    done: dict[Work, float] = {}
    clock, position = [0.0] * topology.pipeline, [0] * topology.pipeline
    held, most = [0] * topology.pipeline, [0] * topology.pipeline
    while any(place < len(order) for place, order in zip(position, orders, strict=True)):
        before = sum(position)
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                work = order[position[stage]]
                needed = _needed(work, len(costs))
                if needed is not None and needed not in done:
                    break
                start = max(clock[stage], 0.0 if needed is None else done[needed])
                clock[stage] = done[work] = start + costs[work.run] * (backward if work.backward else 1.0)
                held[stage] += -1 if work.backward else 1
                most[stage] = max(most[stage], held[stage])
                position[stage] += 1
        assert sum(position) > before, "the orders wait for each other"
    busy = [sum(costs[work.run] * (backward if work.backward else 1.0) for work in order) for order in orders]
    return Timeline(max(clock), busy, most)


def _needed(work: Work, runs: int) -> Work | None:
    """What must be done before, on another stage or on this one."""
    if not work.backward:
        return Work(False, work.run - 1, work.micro_batch) if work.run else None
    last = work.run == runs - 1
    return Work(not last, work.run if last else work.run + 1, work.micro_batch)


def _order(topology: Topology, stage: int, micro_batches: int) -> list[Work]:
    """What a stage does, in its order: forward only, then backward and forward in turn, then backward only."""
    stages, runs = topology.pipeline, topology.virtual_pipeline
    behind = stages - stage - 1
    count, ahead = micro_batches, behind
    if runs > 1:
        count = -(-micro_batches // stages) * stages  # rounds of as many micro-batches as stages
        ahead = count * runs if count == stages else 2 * behind + (runs - 1) * stages
    total = count * runs
    ahead = min(total, ahead)

    def work(number: int, *, backward: bool) -> Work:
        if runs == 1:
            return Work(backward, stage, number)
        own = number // stages % runs
        own = runs - 1 - own if backward else own
        return Work(backward, own * stages + stage, number // (stages * runs) * stages + number % stages)

    order = [work(number, backward=False) for number in range(ahead)]
    for number in range(total):
        if ahead + number < total:
            order.append(work(ahead + number, backward=False))
        order.append(work(number, backward=True))
    return order

"""What follows from the order in which a pipeline's stages work: waiting, and micro-batches held at the same time.

1F1B: Narayanan et al., 2021, arXiv:2104.04473, section 2.2. Needs neither Paddle nor NumPy.
"""

from __future__ import annotations

from erniekit.parallel.topology import Topology


def bubble_fraction(topology: Topology, micro_batches: int) -> float:
    """The share of a step in which a stage waits, (p - 1) / (m v + p - 1), if every run of layers takes equally long.

    p stages, v runs of layers for each, m micro-batches for each step.
    """
    waiting = topology.pipeline - 1
    return waiting / (micro_batches * topology.virtual_pipeline + waiting)


def chunks_in_flight(topology: Topology, pp_stage: int, micro_batches: int) -> int:
    """How often a stage has gone forward through one of its runs of layers and not yet back, at most.

    Without interleaving a run is all of the stage's layers, so this is a number of micro-batches.
    """
    num_stages, chunks = topology.pipeline, topology.virtual_pipeline
    stages_after = num_stages - pp_stage - 1
    if chunks == 1:
        return min(micro_batches, stages_after + 1)
    if micro_batches <= num_stages:  # fleet then goes forward through everything first
        return num_stages * chunks
    return min(max(micro_batches, 2 * num_stages) * chunks, 2 * stages_after + (chunks - 1) * num_stages + 1)

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


def runs_in_flight(topology: Topology, stage: int, micro_batches: int) -> int:
    """How often a stage has gone forward through one of its runs of layers and not yet back, at most.

    Without interleaving a run is all of the stage's layers, so this is a number of micro-batches.
    """
    stages, runs = topology.pipeline, topology.virtual_pipeline
    behind = stages - stage - 1
    if runs == 1:
        return min(micro_batches, behind + 1)
    if micro_batches <= stages:  # fleet then goes forward through everything first
        return stages * runs
    return min(max(micro_batches, 2 * stages) * runs, 2 * behind + (runs - 1) * stages + 1)

"""The formulas of a pipeline's schedule against the schedule itself, played through."""

from __future__ import annotations

import pytest

from erniekit.parallel.schedule import bubble_fraction, runs_in_flight
from erniekit.parallel.topology import Topology


def _play(stages: int, micro_batches: int) -> tuple[float, list[int]]:
    """1F1B with steps of one unit forward and one backward: the share of waiting, and what each stage holds at most."""
    done_forward = [[-1] * micro_batches for _ in range(stages)]  # when each was finished
    done_backward = [[-1] * micro_batches for _ in range(stages)]
    forward, backward, held = [0] * stages, [0] * stages, [0] * stages
    clock = 0
    while min(backward) < micro_batches:
        for stage in range(stages):
            warm = min(micro_batches, stages - stage)
            first, last = stage == 0, stage == stages - 1
            wants_backward = forward[stage] == micro_batches or forward[stage] - backward[stage] == warm
            if wants_backward:
                number = min(backward[stage], micro_batches - 1)
                ready = done_forward[stage][number] if last else done_backward[stage + 1][number]
                if backward[stage] < micro_batches and -1 < ready < clock:
                    done_backward[stage][number], backward[stage] = clock, number + 1
            else:
                number = forward[stage]
                if first or -1 < done_forward[stage - 1][number] < clock:
                    done_forward[stage][number], forward[stage] = clock, number + 1
            held[stage] = max(held[stage], forward[stage] - backward[stage])
        clock += 1
    return (clock - 2 * micro_batches) / clock, held


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
def test_the_formulas_are_those_of_the_schedule(stages: int, micro_batches: int) -> None:
    topology = Topology(pipeline=stages)
    waiting, held = _play(stages, micro_batches)
    assert bubble_fraction(topology, micro_batches) == pytest.approx(waiting)
    assert [runs_in_flight(topology, stage, micro_batches) for stage in range(stages)] == held


def test_interleaving_waits_less_and_holds_more() -> None:
    plain, interleaved = Topology(pipeline=4), Topology(pipeline=4, virtual_pipeline=2)
    assert bubble_fraction(interleaved, 8) == 3 / 19 < bubble_fraction(plain, 8) == 3 / 11
    runs = [runs_in_flight(interleaved, stage, 8) for stage in range(4)]
    assert runs == [11, 9, 7, 5]  # of half a stage's layers each: 5.5 micro-batches instead of 4
    assert [runs_in_flight(interleaved, stage, 4) for stage in range(4)] == [8] * 4  # all forward first

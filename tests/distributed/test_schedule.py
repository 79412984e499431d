"""The formulas of a pipeline's schedule against the schedule itself, played through."""

from __future__ import annotations

from typing import Any

import pytest

from erniekit.distributed.planning import pipeline_bubble
from erniekit.distributed.planning.divisibility import check_divisible
from erniekit.distributed.planning.pipeline_bubble import MOST_SIMULATED, bubble, chunk_costs, simulate
from erniekit.distributed.stages import bubble_fraction, chunks_in_flight, layer_chunks
from erniekit.distributed.topology import Topology
from erniekit.errors import ConfigurationError
from erniekit.model.architectures.published import published_model


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
@pytest.mark.parametrize("backward", [1.0, 2.0, 3.0])
def test_the_formulas_are_those_of_the_schedule(stages: int, micro_batches: int, backward: float) -> None:
    topology = Topology(pipeline=stages)
    timeline = simulate(topology, micro_batches, [1.0] * stages, backward=backward)
    assert timeline.bubble == pytest.approx(bubble_fraction(topology, micro_batches))
    assert timeline.length == pytest.approx((micro_batches + stages - 1) * (1 + backward))
    assert timeline.in_flight == [chunks_in_flight(topology, stage, micro_batches) for stage in range(stages)]


@pytest.mark.parametrize(("stages", "virtual", "micro_batches"), [(3, 2, 6), (4, 2, 8), (4, 3, 16), (4, 2, 4)])
def test_the_formulas_hold_for_interleaved_stages(stages: int, virtual: int, micro_batches: int) -> None:
    topology = Topology(pipeline=stages, virtual_pipeline=virtual)
    timeline = simulate(topology, micro_batches, [1.0] * (stages * virtual))
    assert timeline.bubble == pytest.approx(bubble_fraction(topology, micro_batches))
    assert timeline.in_flight == [chunks_in_flight(topology, stage, micro_batches) for stage in range(stages)]


def test_interleaving_waits_less_and_holds_more() -> None:
    plain, interleaved = Topology(pipeline=4), Topology(pipeline=4, virtual_pipeline=2)
    assert bubble_fraction(interleaved, 8) == 3 / 19 < bubble_fraction(plain, 8) == 3 / 11
    chunks = [chunks_in_flight(interleaved, stage, 8) for stage in range(4)]
    assert chunks == [11, 9, 7, 5]  # of half a stage's layers each: 5.5 micro-batches instead of 4
    assert [chunks_in_flight(interleaved, stage, 4) for stage in range(4)] == [8] * 4  # all forward first


def test_the_longest_stage_sets_the_pace() -> None:
    topology = Topology(pipeline=3)
    even = simulate(topology, 12, [2.0, 2.0, 2.0])
    uneven = simulate(topology, 12, [1.0, 4.0, 1.0])
    assert sum(uneven.busy) == sum(even.busy) and uneven.bubble > 2 * even.bubble
    assert uneven.length == pytest.approx(
        12 * 4.0 * 3 + 1.0 + 2.0
    )  # its own work, and the first stage before and after


def test_what_a_run_of_layers_costs_a_token() -> None:
    model = published_model("baidu/ERNIE-4.5-300B-A47B-PT")
    assert model is not None
    costs = chunk_costs(model, layer_chunks(54, Topology(pipeline=3)))
    assert sum(costs) == pytest.approx(47e9, rel=0.02)  # the weights that its name says are active
    head = model.vocab_size * model.hidden_size
    assert costs[2] - costs[1] == pytest.approx(head)
    assert costs[0] == pytest.approx(costs[1], rel=0.001)  # a dense layer is as wide as the experts of a token


@pytest.mark.parametrize(("stages", "virtual", "micro_batches"), [(4, 1, 5000), (8, 1, 2507), (3, 2, 3500)])
def test_the_bubble_of_many_micro_batches_is_that_of_the_whole_schedule(
    stages: int, virtual: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = Topology(pipeline=stages, virtual_pipeline=virtual)
    costs = [1.0 + 0.3 * (number % 3) for number in range(stages * virtual)]
    whole = simulate(topology, micro_batches, costs).bubble
    counts: list[int] = []

    def counted(topology: Topology, micro_batches: int, *arguments: Any, **named: Any) -> Any:
        counts.append(micro_batches)
        return simulate(topology, micro_batches, *arguments, **named)

    monkeypatch.setattr(pipeline_bubble, "simulate", counted)
    assert bubble(topology, micro_batches, costs) == pytest.approx(whole)
    assert 2 * counts[0] * stages * virtual <= MOST_SIMULATED  # passes, however many micro-batches a step has


def test_a_number_in_a_file_is_no_amount_of_work() -> None:
    """Anything done once for each micro-batch, shard or rank would take minutes here, or all memory."""
    model = published_model("baidu/ERNIE-4.5-21B-A3B-PT")
    assert model is not None
    assert 0 < bubble(Topology(pipeline=2), 10**12, [1.0, 2.0]) < 1
    assert bubble(Topology(), 10**12, [1.0]) == 0
    assert bubble(Topology(pipeline=1000), 10**12, [1.0] * 1000) < 1e-8
    with pytest.raises(ConfigurationError, match="1,048,576"):
        Topology(tensor=2**20, pipeline=2**20)
    with pytest.raises(ConfigurationError, match="1,048,576"):
        Topology().on(10**8)
    with pytest.raises(ConfigurationError, match="does not divide"):
        check_divisible(model, Topology(tensor=2**20), max_seq_len=8)
    with pytest.raises(ConfigurationError, match="too many for 28 layers"):
        layer_chunks(28, Topology(pipeline=2**20), tail=2**20 - 28)

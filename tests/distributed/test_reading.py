"""Every layout sees the same global batches in the same order; with `distributed_dataloader` few ranks read them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.cases import reading
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed


def global_batches(ranks: list[dict[str, Any]]) -> list[list[Any]]:
    """The micro-batches of every step in the order of the plan, from those of the ranks that divide them."""
    of_reader = {rank["reader"]: rank["steps"] for rank in ranks}
    world = len(of_reader)
    return [
        [of_reader[number % world][step][number // world] for number in range(world * len(of_reader[0][step]))]
        for step in range(reading.STEPS)
    ]


@pytest.mark.parametrize(
    ("count", "degrees", "readers"),
    [
        (2, {"tensor": 2}, {0}),
        (4, {"tensor": 2, "pipeline": 2}, {0}),
        (4, {"tensor": 2}, {0, 2}),
        (4, {"pipeline": 2, "sharding": 2}, {0, 1}),
    ],
)
def test_one_rank_of_a_group_reads_for_all_of_it(count: int, degrees: dict[str, int], readers: set[int]) -> None:
    (alone,) = run_ranks(reading.read_together, 1, distributed=0, workers=0, degrees={})
    ranks = run_ranks(reading.read_together, count, distributed=1, workers=2, degrees=degrees)
    assert {number for number, rank in enumerate(ranks) if rank["samples read"]} == readers
    assert global_batches(ranks) == global_batches([alone])
    evaluated = sorted({str(turn) for rank in ranks for turn in rank["evaluation"] if turn[1] != [[]]})
    assert evaluated == sorted(map(str, alone["evaluation"]))
    for rank in ranks:
        same = next(other for other in ranks if other["reader"] == rank["reader"])
        assert (rank["steps"], rank["evaluation"]) == (same["steps"], same["evaluation"])
        assert rank["described"] == ranks[0]["described"]


def test_every_rank_reads_where_it_is_off() -> None:
    ranks = run_ranks(reading.read_together, 2, distributed=0, workers=0, degrees={"tensor": 2})
    assert ranks[0] == ranks[1] and ranks[0]["samples read"] > 0

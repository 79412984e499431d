"""Rows between ranks: exchanged, gathered and summed, with uneven and empty parts, forward and backward."""

from __future__ import annotations

import pytest

from tests.distributed.cases import all_to_all
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed
counts = pytest.mark.parametrize("count", [2, 4])


@counts
def test_rows_reach_those_who_want_them_and_gradients_come_back(count: int) -> None:
    received = run_ranks(all_to_all.exchange, count)
    tables = [table for table in all_to_all.EXCHANGES[count] for _ in ("exact", "padded")]
    assert received == [[sum(row[rank] for row in table) for table in tables] for rank in range(count)]


@counts
def test_everyone_sees_all_rows_and_gets_the_sums_of_its_own(count: int) -> None:
    run_ranks(all_to_all.gather, count)


def test_replicas_add_up() -> None:
    run_ranks(all_to_all.replicas, 4)


def test_backward_runs_in_one_order_whatever_a_rank_holds() -> None:
    assert run_ranks(all_to_all.two_branches, 2) == [["shared", "routed"]] * 2

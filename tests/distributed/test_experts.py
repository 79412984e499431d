"""Layers of experts on ranks against the whole layer: every way of dispatch, recomputed or not, frozen or not."""

from __future__ import annotations

import pytest

from tests.distributed.cases import experts
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(("count", "sequence"), [(2, False), (2, True), (4, True)])
def test_tensor_parallel_ranks_compute_the_whole_layer(count: int, sequence: bool) -> None:
    compared = run_ranks(experts.tensor_ranks, count, sequence=sequence)
    assert [len(whats) for whats in compared] == [(5 if sequence else 2) * 2 * 3] * count


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_with_data_of_their_own_share_the_experts(count: int) -> None:
    compared = run_ranks(experts.data_ranks, count)
    assert [len(whats) for whats in compared] == [4 * 2 * 3] * count


def test_shared_experts_come_before_routed_ones_in_backward_on_every_rank() -> None:
    shared, routed = ["all_gather", "reduce_scatter_tensor"], ["all_to_all_single"] * 2
    assert run_ranks(experts.order_of_backward, 2) == [shared + routed] * 2

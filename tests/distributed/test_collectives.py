"""Collectives, groups and waiting on real ranks."""

from __future__ import annotations

import re
import time

import pytest

from tests.distributed.cases import collectives, groups
from tests.distributed.ranks import RanksFailedError, run_ranks

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("count", [2, 4])
def test_every_collective_gives_what_numpy_gives(count: int) -> None:
    checked = run_ranks(collectives.check_all, count)
    assert checked == [checked[0]] * count and len(checked[0]) == 10


def test_groups_form_again_and_again() -> None:
    run_ranks(groups.form_many, 4, times=20)


def test_a_slow_rank_is_not_a_fault() -> None:
    waited = run_ranks(groups.one_is_late, 2, seconds=0.7)
    assert waited[0] >= 4 * 0.6  # it did wait, each time


@pytest.mark.exhaustive  # two minutes, mostly of waiting
def test_a_rank_that_is_later_than_gloo_allows_is_not_a_fault() -> None:
    """Gloo gives up after a fixed 30 s."""
    assert run_ranks(groups.one_is_late, 2, timeout=200, seconds=33)[0] >= 4 * 32


def test_a_rank_that_hangs_past_the_timeout_is_named() -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailedError) as raised:
        run_ranks(groups.one_hangs, 2, patience=5)
    assert "RankTimeoutError: rank 0: rank 1 has sent nothing for 5 s" in str(raised.value)
    assert time.monotonic() - started < 5 + 15 + 5  # start-up, patience, and what a failure may take


def test_a_rank_that_does_not_join_is_named() -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailedError) as raised:
        run_ranks(groups.one_does_not_join, 3, patience=5)  # ranks 0 and 2 may start apart
    assert re.search(r"rank 1 hangs: rank [02] waited in vain for the others to start", str(raised.value))
    assert "in one_does_not_join" in str(raised.value)
    assert time.monotonic() - started < 5 + 15 + 5  # start-up, patience, and what a failure may take


def test_a_rank_that_ends_wakes_those_that_wait_for_it() -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailedError) as raised:
        run_ranks(groups.one_ends, 3)
    text = str(raised.value)
    assert text.startswith("rank 1 failed") and "ValueError: the seventh sample is bad" in text
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("turn", range(5))
def test_fleet_starts_with_two_by_two(turn: int) -> None:
    found = run_ranks(groups.start_fleet, 4, tensor=2, pipeline=2)
    assert [ranks["tensor"] for ranks in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [ranks["pipeline"] for ranks in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]


@pytest.mark.parametrize("degrees", [{"sharding": 2, "tensor": 2}, {"pipeline": 2}, {"sharding": 2}])
def test_fleets_groups_are_those_of_the_topology(degrees: dict) -> None:
    run_ranks(groups.start_fleet, 4, **degrees)

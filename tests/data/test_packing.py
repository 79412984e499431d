from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from erniekit.data.packing import Packs, concatenate_packs, pack_greedy, pack_none, pack_sequential

lengths_and_capacity = st.integers(1, 40).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=60), st.just(capacity))
)


def fewest_packs(lengths: list[int], capacity: int) -> int:
    """The optimum, by trying for every sample every pack."""
    best = len(lengths)

    def assign(index: int, rooms: list[int]) -> None:
        nonlocal best
        if len(rooms) >= best:
            return
        if index == len(lengths):
            best = len(rooms)
            return
        for number, room in enumerate(rooms):
            if room >= lengths[index]:
                assign(index + 1, [*rooms[:number], room - lengths[index], *rooms[number + 1 :]])
        assign(index + 1, [*rooms, capacity - lengths[index]])

    assign(0, [])
    return best


def loads(packs: Packs, lengths: np.ndarray) -> list[int]:
    return [int(lengths[pack].sum()) for pack in packs]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(lengths_and_capacity)
@pytest.mark.parametrize("pack", [pack_greedy, pack_sequential, lambda lengths, capacity: pack_none(lengths)])
def test_every_sample_once_and_no_pack_too_full_or_empty(pack, case):
    lengths, capacity = np.array(case[0], dtype=np.int64), case[1]
    packs = pack(lengths, capacity)
    assert sorted(itertools.chain.from_iterable(p.tolist() for p in packs)) == list(range(len(lengths)))
    assert all(0 < load <= capacity for load in loads(packs, lengths))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(lengths_and_capacity)
def test_a_pack_is_closed_only_when_nothing_left_fits(case):
    lengths, capacity = np.array(case[0], dtype=np.int64), case[1]
    packs = pack_greedy(lengths, capacity)
    left = sorted(case[0])
    for pack, load in zip(packs, loads(packs, lengths), strict=True):
        for length in lengths[pack].tolist():
            left.remove(length)
        assert not left or load + left[0] > capacity


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_packing_is_within_the_bound_of_the_optimum(lengths):
    packs = pack_greedy(np.array(lengths), 20)
    assert len(packs) < max(2, 2 * fewest_packs(lengths, 20))


def test_the_longest_opens_the_next_in_order_follow_the_best_fits_complete():
    packs = pack_greedy(np.array([2, 6, 5, 9, 1, 4, 3, 1]), 20)
    # 9 opens; 2 and 6 follow in order, and 3 are free, not more than a quarter; 3 is the best fit
    assert [pack.tolist() for pack in packs] == [[3, 0, 1, 6], [2, 4, 5, 7]]


def test_packs_hold_a_mixture_of_lengths():
    """Packs of samples of one length are packs of one kind of sample, from which models learn badly."""
    lengths = np.random.default_rng(0).integers(15, 61, 10_000)
    packs = pack_greedy(lengths, 512)
    within = np.mean([lengths[pack].std() for pack in packs])
    assert within > 0.9 * lengths.std()
    assert lengths.sum() / (len(packs) * 512) > 0.995


def test_sequential_keeps_the_order_and_opens_a_pack_when_full():
    packs = pack_sequential(np.array([5, 4, 2, 9, 1, 10, 3]), 10)
    assert [pack.tolist() for pack in packs] == [[0, 1], [2], [3, 4], [5], [6]]


def test_no_samples_no_packs():
    empty = np.array([], dtype=np.int64)
    assert (
        len(pack_greedy(empty, 8))
        == len(pack_sequential(empty, 8))
        == len(pack_none(empty))
        == len(concatenate_packs([]))
        == 0
    )


def test_reordering_renaming_and_joining_keep_packs_together():
    packs = pack_sequential(np.array([3, 3, 4, 4]), 6)
    moved = packs.reordered(np.array([2, 0, 1]))
    assert [pack.tolist() for pack in moved] == [[3], [0, 1], [2]]
    named = moved.select_from(np.array([10, 11, 12, 13]))
    assert [pack.tolist() for pack in named] == [[13], [10, 11], [12]]
    assert [pack.tolist() for pack in concatenate_packs([named, packs])] == [[13], [10, 11], [12], [0, 1], [2], [3]]
    with pytest.raises(IndexError):
        named[3]


@pytest.mark.parametrize("policy", ["ours (`greedy_intokens`), window of 100,000", "upstream's policy"])
def test_the_benchmark_measures_a_policy(policy):
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "tools/bench/packing.py"), "--case", json.dumps([2000, 4096, policy])]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)
    assert 0.5 < found["full"] <= 1 and found["seconds"] > 0


@pytest.mark.parametrize("capacity", [4096, 8192])
def test_realistic_lengths_fill_packs_almost_completely(capacity):
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.5, 1.0, 100_000).astype(np.int64), 1, capacity)
    packs = pack_greedy(lengths, capacity)
    assert lengths.sum() / (len(packs) * capacity) >= 0.998

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from erniekit.data.mixing import MAX_OVERSAMPLED_EPOCH, STRATEGIES, Purpose, epoch_order, generator
from erniekit.errors import DataError


def order_of(sizes, probabilities, strategy, *, seed=1, epoch=0, shuffle=True, num_samples=1000, repeat=False):
    source_of = np.repeat(np.arange(len(sizes), dtype=np.int16), sizes)
    return epoch_order(
        source_of, probabilities, strategy, seed=seed, epoch=epoch, shuffle=shuffle,
        num_samples=num_samples, repeat=repeat,
    )  # fmt: skip


def per_source(order, sizes):
    source_of = np.repeat(np.arange(len(sizes)), sizes)
    return np.bincount(source_of[order], minlength=len(sizes)).tolist()


def repeats(order):
    return Counter(Counter(order.tolist()).values())


@pytest.mark.parametrize("shuffle", [True, False])
def test_concat_has_everything_once(shuffle):
    order = order_of([5, 1, 30], [0.1, 0.8, 0.1], "concat", shuffle=shuffle)
    assert sorted(order.tolist()) == list(range(36))


def test_random_keeps_proportions_and_repeats_only_exhausted_sources():
    sizes = [100, 100]
    order = order_of(sizes, [0.75, 0.25], "random")
    assert per_source(order, sizes) == [150, 50]
    first = Counter(order[order < 100].tolist())
    assert (len(first), set(first.values())) == (100, {1, 2})  # all 100, then 50 of them again
    assert repeats(order[order >= 100]) == {1: 50}


def test_random_epochs_are_limited_by_num_samples_and_by_the_data():
    assert per_source(order_of([100, 300], [1, 1], "random", num_samples=41), [100, 300]) in ([21, 20], [20, 21])
    assert len(order_of([100, 300], [1, 3], "random", num_samples=6_000_000)) == 400
    assert repeats(order_of([400], [1.0], "random", num_samples=6_000_000)) == {1: 400}
    assert repeats(order_of([400], [1.0], "random", num_samples=1000, repeat=True)) == {2: 200, 3: 200}


def test_interleave_under_stops_when_the_first_source_is_used_up():
    sizes = [10, 90]
    order = order_of(sizes, [0.5, 0.5], "interleave_under")
    assert per_source(order, sizes) == [10, 10]
    assert repeats(order) == {1: 20}
    assert per_source(order_of([30, 90], [0.25, 0.75], "interleave_under"), [30, 90]) == [30, 90]


def test_interleave_over_goes_on_until_all_sources_are_used_up():
    sizes = [10, 90]
    order = order_of(sizes, [0.5, 0.5], "interleave_over")
    assert per_source(order, sizes) == [90, 90]
    assert repeats(order[order < 10]) == {9: 10}
    assert repeats(order[order >= 10]) == {1: 90}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_source_of_probability_zero_takes_no_part_and_shifts_no_other(strategy):
    sizes = [10, 20, 30]
    assert per_source(order_of(sizes, [0, 0.4, 0.6], strategy), sizes) == [0, 20, 30]
    assert per_source(order_of([10, 0, 30], [1, 0, 1], strategy), [10, 0, 30])[1] == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_shuffling_sources_keep_file_order_and_are_mixed_evenly(strategy):
    order = order_of([20, 60], [1, 3], strategy, shuffle=False)
    own = [index for index in order if index < 20]
    assert own == list(range(20))
    assert [index for index in order if index >= 20] == list(range(20, 80))
    for start in range(0, 80, 8):
        assert sum(order[start : start + 8] < 20) == 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_order_depends_on_seed_and_epoch_only(strategy):
    def order(**more):
        return order_of([50, 70], [0.3, 0.7], strategy, **more).tolist()

    assert order() == order()
    assert order() != order(seed=2)
    assert order() != order(epoch=1)
    assert order(shuffle=False) == order(shuffle=False, seed=2, epoch=3)


def test_passes_are_the_permutations_drawn_one_after_another():
    order = order_of([7], [1.0], "random", num_samples=24, repeat=True)
    rng = generator(Purpose.SAMPLE_ORDER, 1, 0)
    expected = np.concatenate([rng.permutation(7) for _ in range(4)])[:24]
    assert order.tolist() == expected[rng.permutation(24)].tolist()


TOO_MANY = {
    "random": ("random", [1, 1], 10**14, r"100,000,000,000,000 samples.*\n.*num_samples_each_epoch"),
    "random-beyond-floats": ("random", [1, 1], 10**400, r"1\.00e\+400 samples.*\n.*num_samples_each_epoch"),
    "over": (
        "interleave_over",
        [1, 1e-9],
        1,
        r"70,000,000,070 samples, from data with 120.*\n.*train_dataset_prob",
    ),
    "over-tiny": ("interleave_over", [0.5, 1e-300], 1, r"3\.50e\+301 samples.*\n.*train_dataset_prob"),
    "over-endless": ("interleave_over", [1e300, 5e-324], 1, r"Infinity samples.*\n.*train_dataset_prob"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("strategy, probabilities, num_samples, message", TOO_MANY.values(), ids=TOO_MANY)
def test_epochs_that_no_memory_holds_are_refused_at_once(strategy, probabilities, num_samples, message):
    with pytest.raises(DataError, match=f"mix_strategy {strategy}: an epoch would have {message}"):
        order_of([50, 70], probabilities, strategy, num_samples=num_samples, repeat=True)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("probabilities", [[0.5, 1e-300], [1e300, 5e-324]])
def test_a_probability_next_to_nothing_leaves_next_to_nothing(probabilities):
    assert per_source(order_of([50, 70], probabilities, "interleave_under"), [50, 70]) == [50, 0]
    assert per_source(order_of([50, 70], probabilities, "random"), [50, 70]) == [120, 0]


def test_data_is_never_too_large_for_an_epoch_in_which_nothing_repeats(monkeypatch):
    monkeypatch.setattr("erniekit.data.mixing.MAX_OVERSAMPLED_EPOCH", 100)
    for strategy in STRATEGIES:
        assert len(order_of([50, 70], [50, 70], strategy)) == 120
    assert len(order_of([50, 70], [1, 1], "random", num_samples=120, repeat=True)) == 120
    with pytest.raises(DataError, match="an epoch would have 121 samples"):
        order_of([50, 70], [1, 1], "random", num_samples=121, repeat=True)


def test_a_source_of_one_sample_repeats_a_million_times_quickly():
    order = order_of([1, 1_000_000], [1, 1], "interleave_over")
    assert per_source(order, [1, 1_000_000]) == [1_000_000, 1_000_000]
    assert len(order) < MAX_OVERSAMPLED_EPOCH


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    sources=st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from([0.0, 0.1, 1 / 3, 0.7, 2.0])), min_size=1, max_size=4
    ),
    strategy=st.sampled_from(STRATEGIES),
    shuffle=st.booleans(),
    num_samples=st.integers(1, 60),
)
def test_no_sample_comes_again_before_its_source_is_used_up(sources, strategy, shuffle, num_samples):
    sizes, probabilities = zip(*sources, strict=True)
    if not any(probabilities):
        probabilities = (1.0, *probabilities[1:])
    order = order_of(sizes, probabilities, strategy, shuffle=shuffle, num_samples=num_samples)
    counts = np.bincount(order, minlength=sum(sizes))
    start = 0
    exhausted = []
    for size, probability in zip(sizes, probabilities, strict=True):
        own = counts[start : start + size]
        start += size
        if probability == 0:
            assert not own.any()
        elif size:
            assert own.max() - own.min() <= 1
            exhausted.append(own.min() >= 1)
    if exhausted and strategy == "interleave_under":
        assert any(exhausted)
        assert counts.max() == 1
    if strategy in ("interleave_over", "concat"):
        assert all(exhausted)
    if strategy == "random":
        assert len(order) == min(
            num_samples, sum(size for size, share in zip(sizes, probabilities, strict=True) if share)
        )


def test_unknown_strategies_and_unusable_probabilities():
    with pytest.raises(DataError, match="mix_strategy 'zip': expected one of random, concat"):
        order_of([3], [1.0], "zip")
    with pytest.raises(DataError, match="at least one above 0"):
        order_of([3], [0.0], "concat")

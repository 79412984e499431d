"""Batches of samples of similar length under a budget of tokens, and the curriculum by length."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.data.eval_sampler import EvaluationPlan
from erniekit.data.packing import group_by_length
from erniekit.errors import DataError
from tests.data.test_sampler import LENGTHS, dataset_of, packs_of_step, plan_of, samples_of_epoch

BUDGETED = {"packing": False, "batch_tokens": 96, "accumulation": 2}


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 200), st.integers(0, 9))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_groups_keep_to_the_budget_and_are_as_large_as_it_allows(lengths, budget, most):
    groups = [group.tolist() for group in group_by_length(np.array(lengths, np.int64), budget, most)]
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[i] for i in group)
        assert len(group) * longest <= budget and (not most or len(group) <= most)
    for shorter, longer in itertools.pairwise(groups):
        assert max(lengths[i] for i in shorter) <= min(lengths[i] for i in longer)
        room = len(longer) + 1
        assert room * max(lengths[i] for i in longer) > budget or room > most > 0


@given(
    lengths=st.lists(st.integers(1, 32), min_size=1, max_size=50), budget=st.integers(32, 150),
    window=st.integers(1, 60), accumulation=st.integers(1, 3), world=st.integers(1, 3), seed=st.integers(0, 99),
    shuffle=st.booleans(), sorted_first=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_sample_once_an_epoch_within_the_budget(
    lengths, budget, window, accumulation, world, seed, shuffle, sorted_first
):
    dataset = dataset_of(lengths)

    def plan(rank=0):
        return plan_of(
            dataset, packing=False, batch_tokens=budget, window=window, accumulation=accumulation, dp_world_size=world,
            dp_rank=rank, seed=seed, shuffle=shuffle, sorted_first=sorted_first,
        )  # fmt: skip

    ranks = [plan(rank) for rank in range(world)]
    total = ranks[0].total_steps(-1, 2)
    seen = []
    for step in range(total):
        shares = [one.micro_batches(step) for one in ranks]
        assert len({len(share) for share in shares}) == 1
        for batch in itertools.chain.from_iterable(shares):
            assert batch.input_ids.size <= budget
            assert all(len(row) <= 1 for row in batch.samples)
            seen += [row[0] for row in batch.samples if row]
    assert sorted(seen) == sorted(list(range(len(lengths))) * 2)
    # random access, in a plan of its own: resuming needs the number of the step only
    for step in reversed(range(total)):
        assert packs_of_step(plan(), step) == packs_of_step(ranks[0], step)


def test_batches_of_similar_length_are_shuffled_by_seed_and_epoch():
    plan = plan_of(**BUDGETED, window=1000)
    assert samples_of_epoch(plan, 0) == samples_of_epoch(plan_of(**BUDGETED, window=1000), 0)
    assert samples_of_epoch(plan, 0) != samples_of_epoch(plan, 1)
    assert samples_of_epoch(plan, 0) != samples_of_epoch(plan_of(**BUDGETED, window=1000, seed=8), 0)
    batches = [batch for step in range(plan.steps_in_epoch(0)) for batch in plan.micro_batches(step)]
    assert sum(batch.token_count for batch in batches) / sum(batch.input_ids.size for batch in batches) > 0.95


def test_a_step_has_the_same_samples_on_any_number_of_ranks():
    alone = plan_of(**{**BUDGETED, "accumulation": 4})
    shared = [plan_of(**BUDGETED, dp_world_size=2, dp_rank=rank) for rank in range(2)]
    assert alone.total_steps(-1, 3) == shared[0].total_steps(-1, 3)
    for step in range(alone.total_steps(-1, 2)):
        own = [sorted(packs_of_step(plan, step)) for plan in (alone, *shared)]
        assert own[0] == sorted(row for row in own[1] + own[2] if row)


def test_samples_too_short_and_too_long_are_left_out_and_counted():
    plan = plan_of(**BUDGETED, shortest=5, longest=20)
    expected = [index for index, length in enumerate(LENGTHS) if 5 <= length <= 20]
    assert sorted(samples_of_epoch(plan, 0)) == expected
    short, long = int((LENGTHS < 5).sum()), int((LENGTHS > 20).sum())
    assert plan.describe().startswith(f"left out: {short} samples shorter than 5, {long} longer than 20\nepoch 0")
    assert f"{len(expected)} samples" in plan.describe() and "% padding" in plan.describe()
    with pytest.raises(DataError, match="min_sample_len"):
        plan_of(dataset_of([3, 4]), **BUDGETED, shortest=5).total_steps(-1, 1)


def test_no_more_samples_than_allowed():
    plan = plan_of(**BUDGETED, max_batch_samples=3)
    sizes = [len(batch.samples) for step in range(plan.steps_in_epoch(0)) for batch in plan.micro_batches(step)]
    assert max(sizes) == 3


@pytest.mark.parametrize("mode", [{}, {"greedy": False}, {"packing": False}, BUDGETED], ids=str)
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_first_epoch_goes_from_short_to_long_and_the_others_as_without(mode, shuffle):
    plan, plain = plan_of(**mode, sorted_first=True, shuffle=shuffle), plan_of(**mode, shuffle=shuffle)
    first = samples_of_epoch(plan, 0)
    assert sorted(first) == list(range(500))
    assert LENGTHS[first].tolist() == sorted(LENGTHS.tolist())
    assert samples_of_epoch(plan, 1) == samples_of_epoch(plain, 1)
    assert samples_of_epoch(plan, 2) == samples_of_epoch(plain, 2)
    assert plan.total_steps(-1, 3) == sum(plan.steps_in_epoch(epoch) for epoch in range(3))
    assert "short ones first" in plan.describe()


def test_an_evaluation_leaves_out_a_file_whose_samples_are_all_too_short():
    options = {"max_seq_len": 32, "packing": False, "greedy": True, "window": 9, "batch_size": 1, "batch_tokens": 64}
    plan = EvaluationPlan(dataset_of([3] * 5 + [20] * 5, sources=2), **options, shortest=10)
    assert list(plan.sources) == ["source1.jsonl"]
    assert plan.steps_in_epoch(0) == 2
    with pytest.raises(DataError, match="min_sample_len"):
        EvaluationPlan(dataset_of([3] * 5), **options, shortest=10)

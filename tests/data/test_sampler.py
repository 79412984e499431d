from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import threading

import numpy as np
import pytest

from erniekit.data import PLAN_VERSION
from erniekit.data.conversation import Source
from erniekit.data.dataset import Dataset
from erniekit.data.loader import prefetch
from erniekit.data.mixing import Purpose, generator
from erniekit.data.sampler import MAX_COUNTED_EPOCHS, StepPlan, local_batches
from erniekit.data.token_cache import TokenArrays
from erniekit.errors import ConfigurationError, DataError


def dataset_of(lengths, sources=1):
    """Samples whose tokens are their own index, so that batches show where everything went."""
    lengths = np.asarray(lengths, dtype=np.int64)
    parts, names, first = [], [], 0
    for number, own in enumerate(np.array_split(lengths, sources)):
        ids = np.repeat(np.arange(first, first + len(own), dtype=np.int32), own)
        offsets = np.concatenate(([0], np.cumsum(own)))
        counts = {"read": len(own), "dropped": 0, "truncated": 0, "split": 0, "targets": len(ids)}
        metadata = {"counts": counts, "unused_fields": []}
        parts.append(TokenArrays(ids, ids, offsets, np.arange(1, len(own) + 1, dtype=np.int32), metadata))
        names.append(Source(f"source{number}.jsonl", "text"))
        first += len(own)
    return Dataset(names, parts, pad_id=0, fingerprint="")


LENGTHS = np.random.default_rng(3).integers(1, 33, 500)


def plan_of(dataset=None, **changes):
    packing = {"max_seq_len": 32, "packing": True, "greedy": True, "window": 100}
    settings = {**packing, "batch_size": 4, "accumulation": 2, "seed": 7}
    return StepPlan(dataset if dataset is not None else dataset_of(LENGTHS), **{**settings, **changes})


def packs_of_step(plan, step):
    return [row for batch in plan.micro_batches(step) for row in batch.samples]


def samples_of_epoch(plan, epoch):
    first = plan._first_step(epoch)
    steps = range(first, first + plan.steps_in_epoch(epoch))
    return list(itertools.chain.from_iterable(row for step in steps for row in packs_of_step(plan, step)))


MODES = {
    "greedy": {},
    "sequential": {"greedy": False},
    "unpacked": {"packing": False},
    "in-order": {"shuffle": False},
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_an_epoch_holds_every_sample_once_and_no_row_is_too_long(mode):
    plan = plan_of(**mode)
    for epoch in (0, 1):
        assert sorted(samples_of_epoch(plan, epoch)) == list(range(500))
    for step in range(plan.steps_in_epoch(0)):
        for batch in plan.micro_batches(step):
            assert batch.input_ids.shape[1] <= 32
            for row, samples in enumerate(batch.samples):
                tokens = np.repeat(samples, LENGTHS[list(samples)])
                assert batch.input_ids[row, : len(tokens)].tolist() == tokens.tolist()


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_plan_is_a_function_of_seed_and_epoch(mode):
    def rows(plan):
        return [packs_of_step(plan, step) for step in range(10)]

    assert rows(plan_of(**mode)) == rows(plan_of(**mode))
    assert (rows(plan_of(**mode)) == rows(plan_of(**{**mode, "seed": 8}))) == (mode == MODES["in-order"])


def test_steps_can_be_asked_for_in_any_order():
    in_order, at_random = plan_of(), plan_of()
    expected = [packs_of_step(in_order, step) for step in range(3 * in_order.steps_in_epoch(0))]
    for step in np.random.default_rng(0).permutation(len(expected)):
        assert packs_of_step(at_random, step) == expected[step]


def test_a_step_has_the_same_packs_however_they_are_spread():
    plans = {
        "batch": plan_of(batch_size=4, accumulation=1),
        "accumulated": plan_of(batch_size=1, accumulation=4),
        "both": plan_of(batch_size=2, accumulation=2),
    }
    assert len({plan.steps_in_epoch(0) for plan in plans.values()}) == 1
    for step in range(plans["batch"].steps_in_epoch(0)):
        first, *others = (packs_of_step(plan, step) for plan in plans.values())
        assert all(other == first for other in others)
    assert [len(plan.micro_batches(0)) for plan in plans.values()] == [1, 4, 2]


@pytest.mark.parametrize("batch_size, accumulation, world", [(1, 2, 4), (2, 2, 2), (4, 1, 2), (1, 1, 8)])
def test_ranks_share_a_step_and_have_as_many_micro_batches_each(batch_size, accumulation, world):
    dataset = dataset_of(LENGTHS[:-8])
    single = plan_of(dataset, batch_size=8, accumulation=1)
    ranks = [
        plan_of(dataset, batch_size=batch_size, accumulation=accumulation, dp_rank=rank, dp_world_size=world)
        for rank in range(world)
    ]
    last = single.steps_in_epoch(0) - 1
    assert 0 < len(packs_of_step(single, last)) < 8  # the partial step is among those checked
    for step in (0, 1, last):
        shares = [plan.micro_batches(step) for plan in ranks]
        assert len({len(share) for share in shares}) == 1
        rows = [row for share in shares for batch in share for row in batch.samples if row]
        assert sorted(rows) == sorted(packs_of_step(single, step))
        targets = sum(batch.target_count for share in shares for batch in share)
        assert targets == sum(batch.target_count for batch in single.micro_batches(step))
    assert {plan.steps_in_epoch(0) for plan in ranks} == {last + 1}


def test_micro_batches_are_dealt_out_to_ranks_in_turn():
    whole = packs_of_step(plan_of(batch_size=8, accumulation=1), 0)
    ranks = [packs_of_step(plan_of(batch_size=1, accumulation=4, dp_rank=rank, dp_world_size=2), 0) for rank in (0, 1)]
    assert ranks == [whole[0::2], whole[1::2]]


def test_a_rank_without_packs_gets_padding_without_targets():
    plan = plan_of(dataset_of([32, 32, 32]), batch_size=1, accumulation=1, dp_rank=1, dp_world_size=2)
    (batch,) = plan.micro_batches(1)
    assert (batch.target_count, batch.samples) == (0, ((),))


def test_steps_and_epochs_are_counted_exactly():
    plan = plan_of()
    steps = [plan.steps_in_epoch(epoch) for epoch in range(3)]
    assert steps[0] == math.ceil(len(plan.packs(0)) / 8)
    assert plan.total_steps(17, 99) == 17
    assert plan.total_steps(-1, 1) == steps[0]
    assert plan.total_steps(-1, 3) == sum(steps)
    assert plan.epoch_of(0) == 0
    assert plan.epoch_of(steps[0]) == 1
    assert plan.epoch_of(steps[0] + 1) == 1 + 1 / steps[1]


@pytest.fixture
def built(monkeypatch):
    """The epochs that are packed, in order."""
    epochs, build = [], StepPlan._build
    monkeypatch.setattr(StepPlan, "_build", lambda plan, epoch: (epochs.append(epoch), build(plan, epoch))[1])
    return epochs


def test_no_epoch_is_packed_twice_or_for_nothing(built):
    plan = plan_of()
    total = plan.total_steps(-1, 2)
    for step in range(total):
        plan.micro_batches(step)
        plan.epoch_of(step + 1)
    assert plan.epoch_of(total) == 2
    assert built == [0, 1]


def test_counting_many_epochs_keeps_the_first_ones(built):
    plan = plan_of()
    plan.total_steps(-1, 5)
    plan.micro_batches(0)
    plan.micro_batches(plan.steps_in_epoch(0))
    assert built == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("mode", [{"packing": False}, {"shuffle": False}, {"shuffle": False, "greedy": False}])
def test_epochs_of_one_length_are_counted_once_however_many(built, mode):
    plan = plan_of(**mode)
    steps = plan.total_steps(-1, 1)
    assert plan.total_steps(-1, 10**8) == 10**8 * steps
    assert plan.epoch_of(10**8 * steps) == 10**8
    assert plan.epoch_of(3 * steps + 1) == 3 + 1 / steps
    assert packs_of_step(plan, 2 * steps - 1) == packs_of_step(plan_of(**mode), 2 * steps - 1)
    assert len(packs_of_step(plan, 0)) == 8
    assert built.count(0) <= 2  # one of them is the second plan's


def test_a_part_of_an_epoch_has_its_part_of_the_steps_rounded_up():
    """ceil(epochs x steps of an epoch), as transformers computes them."""
    plan = plan_of(packing=False)
    steps = plan.steps_in_epoch(0)
    for epochs in (0.001, 0.5, 1.0, 1.5, 2.26):
        assert plan.total_steps(-1, epochs) == math.ceil(epochs * steps)


def test_too_many_epochs_to_count_are_refused():
    with pytest.raises(ConfigurationError, match=r"num_train_epochs 10,001.*\n.*max_steps"):
        plan_of().total_steps(-1, MAX_COUNTED_EPOCHS + 1)
    assert plan_of().total_steps(5, 10**8) == 5


def test_threads_that_count_at_once_count_every_epoch_once():
    """Both threads are held where they add an epoch, until the other one is there too or plainly does not come."""
    both = threading.Barrier(2)

    class Meeting(list):
        def append(self, value):
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.3)
            super().append(value)

    plan = plan_of()
    plan._first_steps = Meeting([0])
    threads = [threading.Thread(target=plan.steps_in_epoch, args=(0,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert plan._first_steps == [0, plan_of().steps_in_epoch(0)]


def test_the_streams_of_an_epoch_differ_by_purpose():
    keys = [(Purpose.SAMPLE_ORDER, 42, 3), (Purpose.PACK_ORDER, 42, 3), (Purpose.PACK_ORDER, 42, 3, 1)]
    draws = [generator(*key).integers(0, 2**63, 4).tolist() for key in keys]
    assert len({tuple(draw) for draw in draws}) == 3
    assert all(int(purpose) for purpose in Purpose)


def test_the_plan_is_that_of_its_version():
    """Changes with every change of order or packing; then raise PLAN_VERSION and record the new value."""
    digest = hashlib.blake2b(digest_size=8)
    for mode in MODES.values():
        packs = plan_of(dataset_of(np.arange(200) % 31 + 1, sources=2), **mode).packs(1)
        digest.update(packs.members.tobytes() + packs.starts.tobytes())
    assert (PLAN_VERSION, digest.hexdigest()) == (1, "6239a591d2c75188")


def test_shuffled_packs_do_not_come_by_length():
    plan = plan_of(window=500)
    longest = [max(LENGTHS[list(row)]) for step in range(plan.steps_in_epoch(0)) for row in packs_of_step(plan, step)]
    middle = len(longest) // 2
    assert abs(np.mean(longest[:middle]) - np.mean(longest[middle:])) < 3
    ordered = plan_of(window=500, shuffle=False)
    firsts = [min(row) for step in range(ordered.steps_in_epoch(0)) for row in packs_of_step(ordered, step)]
    assert firsts == sorted(firsts)


@pytest.mark.parametrize("window, size", [(100, 100), (499, 250), (500, 500)])
def test_windows_are_packed_on_their_own_and_are_of_equal_size(window, size):
    packs = plan_of(window=window, shuffle=False).packs(0)
    assert all(len(set(pack // size)) == 1 for pack in packs)
    if size > 100:
        assert any(len(set(pack // 100)) > 1 for pack in packs)


def test_sources_are_mixed_by_the_chosen_strategy():
    dataset = dataset_of(LENGTHS, sources=2)
    plan = plan_of(dataset, strategy="random", num_samples_each_epoch=100)
    samples = samples_of_epoch(plan, 0)
    assert len(samples) == 100
    assert np.bincount(dataset.source_of[samples]).tolist() == [50, 50]


def test_nothing_to_train_on():
    with pytest.raises(DataError, match="no sample to train on"):
        plan_of(dataset_of([])).steps_in_epoch(0)


def test_the_description_states_packing_and_steps():
    plan = plan_of()
    text = plan.describe(num_train_epochs=2)
    packs = len(plan.packs(0))
    assert f"epoch 0: 500 samples, {LENGTHS.sum():,} tokens in {packs} packs of at most 32 (greedy)" in text
    assert f"{LENGTHS.sum() / (packs * 32):.1%} full" in text
    steps = plan.steps_in_epoch(0), plan.steps_in_epoch(0) + plan.steps_in_epoch(1)
    assert text.endswith(f"steps: 8 packs each, {steps[0]} an epoch, {steps[1]} in total")


# ---- prefetching


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_prefetching_changes_nothing(workers):
    plan = plan_of()
    stop = plan.steps_in_epoch(0) + 5
    rows = [[row for batch in batches for row in batch.samples] for batches in prefetch(plan_of(), 3, workers, stop)]
    assert rows == [packs_of_step(plan, step) for step in range(3, stop)]


class Failing:
    batch_source = staticmethod(local_batches)

    def __init__(self):
        self.threads = set()

    def micro_batches(self, step):
        return self.batch_source(lambda: self.read(step))

    def read(self, step):
        self.threads.add(threading.current_thread().name)
        if step == 5:
            raise DataError("step 5 has no data")
        return [step]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_in_a_worker_comes_at_its_step_with_its_own_text(workers):
    plan, seen = Failing(), []
    with pytest.raises(DataError, match=r"^step 5 has no data$"):
        for batches in prefetch(plan, 0, workers):
            seen += batches
    assert seen == [0, 1, 2, 3, 4]
    assert ("MainThread" in plan.threads) == (workers == 0)


def test_a_loop_that_stops_early_leaves_no_thread():
    before = threading.active_count()
    batches = prefetch(plan_of(), 0, 2)
    next(batches)
    batches.close()
    assert threading.active_count() == before

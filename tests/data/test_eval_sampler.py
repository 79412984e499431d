"""Held-out files one after another, each in rows of its own."""

from __future__ import annotations

import numpy as np
import pytest

from erniekit.data.eval_sampler import EvaluationPlan
from erniekit.data.open_dataset import open_dataset


@pytest.fixture
def dataset(make_source, tokenizer, template, tmp_path):
    def records(count, text):
        return [{"src": f"{text} {number}?", "tgt": "days " * (1 + number % 7)} for number in range(count)]

    sources = [
        make_source(records(9, "How many"), name="a.jsonl"),
        make_source(records(4, "Which"), probability=0.0, name="left-out.jsonl"),
        make_source(records(23, "Where"), name="b.jsonl"),
    ]
    sources.append(sources[0])
    return open_dataset(sources, tokenizer, template, max_seq_len=64, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_every_sample_once_and_no_row_of_two_files(dataset, packing, batch_size):
    plan = EvaluationPlan(dataset, max_seq_len=64, packing=packing, greedy=True, window=100, batch_size=batch_size)
    a = str(dataset.sources[0].path)
    assert plan.sources == (a, str(dataset.sources[2].path), f"{a} (2)")
    read = {name: [] for name in plan.sources}
    for step in range(plan.steps_in_epoch(0)):
        (batch,) = plan.micro_batches(step)
        samples = [sample for row in batch.samples for sample in row]
        assert len(set(dataset.source_of[samples])) == 1
        read[plan.source_of(step)] += samples
    assert [len(samples) for samples in read.values()] == [9, 23, 9]
    assert sorted(sample for samples in read.values() for sample in samples) == list(range(len(dataset)))
    assert list(read) == list(dict.fromkeys(plan.source_of(step) for step in range(plan.steps_in_epoch(0))))
    assert plan.epoch_of(plan.steps_in_epoch(0)) == 1.0
    assert np.array_equal(dataset.source_of[read[plan.sources[1]]], np.full(23, 2))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("stop", [1, 4, 10])
def test_ranks_divide_the_steps_and_take_as_many_turns(dataset, world, stop):
    options = {"max_seq_len": 64, "packing": False, "greedy": True, "window": 100, "batch_size": 4}
    whole = EvaluationPlan(dataset, **options)
    parts = [
        list(EvaluationPlan(dataset, dp_rank=rank, dp_world_size=world, **options).local_steps(stop))
        for rank in range(world)
    ]
    assert {len(part) for part in parts} == {-(-stop // world)}
    turns = [turn for part in parts for turn in part]
    read = {step: batch for step, batch in turns if batch.token_count}
    assert sorted(read) == list(range(stop))
    for step, batch in read.items():
        assert batch.samples == whole.micro_batches(step)[0].samples
    assert all(batch.samples == ((),) and step < stop for step, batch in turns if not batch.token_count)

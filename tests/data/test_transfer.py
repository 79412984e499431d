"""What is read for others arrives as it was."""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np
import pytest

from erniekit.data.batch import Batch
from erniekit.data.collate import collate
from erniekit.data.dataset import Dataset
from erniekit.data.loader import (
    ArrayMessage,
    deserialize_batches,
    deserialize_index,
    serialize_batches,
    serialize_index,
)
from erniekit.data.open_dataset import open_dataset, open_packed_dataset
from erniekit.data.packed import DataFingerprint, write_packed
from erniekit.data.sampler import StepPlan
from erniekit.data.templates.ernie import PairOffsets, Sample

OPTIONS = {"max_seq_len": 64, "packing": True, "greedy": True, "window": 100, "batch_size": 2, "accumulation": 2}


def sent(message: ArrayMessage) -> ArrayMessage:
    """As it arrives elsewhere: facts through JSON, arrays by value."""
    return ArrayMessage(json.loads(json.dumps(message.metadata)), [array.copy() for array in message.arrays])


def assert_same(own, other) -> None:
    for field in fields(own):
        a, b = getattr(own, field.name), getattr(other, field.name)
        if field.name == "arrays":
            assert list(a) == list(b)
            for name, array in a.items():
                assert array.dtype == b[name].dtype
                np.testing.assert_array_equal(array, b[name], err_msg=name)
        else:
            assert a == b and type(a) is type(b)


@pytest.fixture
def dataset(make_source, tokenizer, template, tmp_path):
    def records(count):
        return [{"src": f"How many {number}?", "tgt": "days " * (1 + number % 7)} for number in range(count)]

    sources = [
        make_source(records(9), name="a.jsonl"),
        make_source(records(4), probability=0.0, name="left-out.jsonl"),
        make_source(records(13), name="b.jsonl"),
    ]
    return open_dataset(sources, tokenizer, template, max_seq_len=64, cache_dir=tmp_path / "cache")


def test_batches(dataset: Dataset) -> None:
    plan = StepPlan(dataset, **OPTIONS)
    batches = [*plan.micro_batches(0), plan.padding()]
    received = deserialize_batches(sent(serialize_batches(batches)))
    assert len(received) == len(batches)
    for own, other in zip(batches, received, strict=True):
        assert isinstance(other, Batch)
        assert_same(own, other)
    assert deserialize_batches(sent(serialize_batches([]))) == []


def test_batches_of_pairs() -> None:
    sample = Sample(np.arange(9, dtype=np.int32), np.arange(9, dtype=np.int32), PairOffsets(3, 6, 0.5))
    batches = [collate([[sample], [sample, sample]], [[4], [7, 5]], 0, pairs=True), collate([[]], [[]], 0, pairs=True)]
    for own, other in zip(batches, deserialize_batches(sent(serialize_batches(batches))), strict=True):
        assert_same(own, other)


def assert_same_index(own: Dataset, other: Dataset) -> None:
    assert other.report == own.report and other.fingerprint == own.fingerprint and len(other) == len(own)
    assert [other.location(i) for i in range(len(own))] == [own.location(i) for i in range(len(own))]
    assert (other.pad_id, other.pairs, other.sources) == (own.pad_id, own.pairs, own.sources)
    packs = own.packed.packs if own.packed else None
    other_packs = other.packed.packs if other.packed else None
    plans = [StepPlan(dataset, **OPTIONS, packs=given) for dataset, given in ((own, packs), (other, other_packs))]
    assert plans[0].describe() == plans[1].describe()
    for epoch in range(2):
        for pack, same in zip(plans[0].packs(epoch), plans[1].packs(epoch), strict=True):
            np.testing.assert_array_equal(pack, same)


def test_the_index_of_a_dataset(dataset: Dataset) -> None:
    received = deserialize_index(sent(serialize_index(dataset)))
    assert_same_index(dataset, received)
    assert len(received.sample(0).input_ids) == 0  # no token has travelled


def test_the_index_of_a_packed_folder(dataset: Dataset, tmp_path) -> None:
    data_fingerprint = DataFingerprint("tokenizer", None, False)
    write_packed(tmp_path / "packed", dataset, StepPlan(dataset, **OPTIONS).packs(0), data_fingerprint)
    packed = open_packed_dataset(tmp_path / "packed", data_fingerprint, max_seq_len=64, pad_id=0)
    assert_same_index(packed, deserialize_index(sent(serialize_index(packed))))

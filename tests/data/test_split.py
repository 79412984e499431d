"""Records that are held out of training."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from erniekit.data.conversation import Source
from erniekit.data.dataset import Dataset
from erniekit.data.formats.problems import RecordProblem
from erniekit.data.open_dataset import open_dataset
from erniekit.data.split import Split, own_records
from erniekit.errors import DataError

FRACTIONS = st.one_of(st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 0.9]), st.floats(0.01, 0.99))


@given(FRACTIONS, st.integers(0, 2**32), st.integers(0, 500))
def test_the_parts_are_disjoint_and_of_the_fraction_asked_for(fraction, seed, count):
    training, held_out = Split(fraction, seed, False), Split(fraction, seed, True)
    taken = [held_out.takes(number) for number in range(count)]
    assert [training.takes(number) for number in range(count)] == [not each for each in taken]
    assert abs(sum(taken) - fraction * count) <= 1
    for first in range(count):  # wherever one looks
        assert abs(sum(taken[first:]) - fraction * (count - first)) < 2


def test_the_seed_draws_and_no_period_shows():
    def held(seed):
        return [number for number in range(1000) if Split(0.1, seed, True).takes(number)]

    assert held(1) == held(1) != held(2)
    assert len({number % 10 for number in held(1)}) == 10
    assert [number // 10 for number in held(1)] == list(range(100))


def test_problems_count_as_records_and_those_of_the_file_concern_both_parts():
    items = [(line, "record") if line % 3 else RecordProblem("f", line, "x", "y", "z") for line in range(40)]
    parts = [list(own_records(items, Split(0.25, 7, held_out))) for held_out in (False, True)]
    assert items[0] in parts[0] and items[0] in parts[1]  # line 0: the file
    assert len(parts[0]) + len(parts[1]) == 41 and sorted(map(repr, parts[0] + parts[1][1:])) == sorted(
        map(repr, items)
    )
    assert list(own_records(items, None)) == items


@pytest.fixture
def open_part(tokenizer, template, tmp_path):
    def open_(held_out: bool | None, *paths, fraction: float = 0.25, seed: int = 7, **options) -> Dataset:
        split = None if held_out is None else Split(fraction, seed, held_out)
        sources = [Source(path, "erniekit", split=split) for path in paths]
        options = {"max_seq_len": 64, "cache_dir": tmp_path / "cache"} | options
        return open_dataset(sources, tokenizer, template, **options)

    return open_


def records(count: int) -> list[dict]:
    return [{"src": f"question {number}", "tgt": f"answer {number}"} for number in range(count)]


def ids(dataset: Dataset) -> list[tuple[int, ...]]:
    return [tuple(dataset.sample(number).input_ids.tolist()) for number in range(len(dataset))]


def test_a_file_is_divided_by_records(open_part, write_jsonl):
    path = write_jsonl(records(40))
    whole, training, held_out = open_part(None, path), open_part(False, path), open_part(True, path)
    assert (len(training), len(held_out)) == (30, 10)
    assert sorted(ids(training) + ids(held_out)) == sorted(ids(whole))
    assert len({whole.fingerprint, training.fingerprint, held_out.fingerprint}) == 3
    assert open_part(False, path, seed=8).fingerprint != training.fingerprint
    assert open_part(False, path, fraction=0.2).fingerprint != training.fingerprint
    assert "(erniekit, 0.25 of its records, held out): 10 records, 10 kept" in str(held_out.report)
    assert "(erniekit, without the held-out records): 30 records, 30 kept" in str(training.report)
    assert held_out.location(0).startswith(f"{path}:") and 1 <= held_out.line(0) <= 4


def test_a_record_of_several_samples_is_in_one_part(open_part, write_jsonl):
    rounds = {"src": ["a", "b", "c"], "tgt": ["d", "e", "f"]}
    path = write_jsonl([rounds] * 20)
    parts = [open_part(held_out, path, split_multi_turn=True) for held_out in (False, True)]
    lines = [{part.line(number) for number in range(len(part))} for part in parts]
    assert lines[0].isdisjoint(lines[1]) and [len(part) for part in parts] == [45, 15]


def test_an_array_on_one_line_is_divided_too(open_part, tmp_path):
    path = tmp_path / "array.json"
    path.write_text(json.dumps(records(8)))
    assert [len(open_part(held_out, path)) for held_out in (False, True)] == [6, 2]


def test_a_malformed_record_concerns_its_own_part(open_part, write_jsonl):
    path = write_jsonl([*records(3), {"src": 1, "tgt": "b"}, *records(36)])
    part = Split(0.25, 7, True).takes(3)
    assert len(open_part(not part, path)) in (10, 30)
    with pytest.raises(DataError, match=r"data\.jsonl:4: src"):
        open_part(part, path)


def test_too_few_records_are_told(open_part, write_jsonl):
    few, many = write_jsonl(records(1), "few.jsonl"), write_jsonl(records(40), "many.jsonl")
    empty = next(seed for seed in range(99) if not Split(0.25, seed, True).takes(0))
    with pytest.raises(DataError, match=r"eval_split 0\.25: of .*few\.jsonl it holds out no record"):
        open_part(True, few, seed=empty)
    assert len(open_part(True, few, many, seed=empty)) == 10
    taken = next(seed for seed in range(99) if Split(0.25, seed, True).takes(0))
    with pytest.raises(DataError, match=r"eval_split 0\.25: it leaves no record of .*few\.jsonl to train on"):
        open_part(False, few, many, seed=taken)

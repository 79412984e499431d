from __future__ import annotations

import math
from pathlib import Path

import pytest

from erniekit.data.sources import Source, check_probabilities, parse_sources
from erniekit.errors import DataError


def test_lists_as_upstream_writes_them():
    assert parse_sources("a.jsonl, b.json", "erniekit,alpaca", "0.8, 0.2") == [
        Source(Path("a.jsonl"), "erniekit", 0.8),
        Source(Path("b.json"), "alpaca", 0.2),
    ]


def test_one_kind_and_one_probability_stand_for_all_files():
    assert parse_sources("a,b", "text", 1.0) == [Source(Path("a"), "text", 1.0), Source(Path("b"), "text", 1.0)]


def test_relative_paths_are_looked_up_beside_the_configuration(tmp_path):
    (tmp_path / "a.jsonl").touch()
    near, far = parse_sources("a.jsonl,nowhere.jsonl", "text", "1", folder=tmp_path)
    assert near.path == tmp_path / "a.jsonl"
    assert far.path == Path("nowhere.jsonl")


@pytest.mark.parametrize(
    "paths, kinds, probabilities, message",
    [
        (" , ", "text", "1", "no data file is named"),
        ("a,b", "text,text,text", "1", "2 data paths, 3 types and 2 probabilities"),
        ("a,b,c", "text", "0.5,0.5", "3 data paths, 3 types and 2 probabilities"),
        ("a", "chatml", "1", "data type chatml: expected one of erniekit, alpaca, messages, text"),
        ("a,b", "text", "0.5,nan", "expected numbers from 0 upwards, got nan"),
        ("a,b", "text", "0.5,inf", "got inf"),
        ("a,b", "text", "0.5,-1", "got -1"),
        ("a,b", "text", "0.5,half", "got half"),
        ("a,b", "text", "0,0.0", "expected at least one above 0"),
    ],
)
def test_lists_that_cannot_be_used(paths, kinds, probabilities, message):
    with pytest.raises(DataError, match=message):
        parse_sources(paths, kinds, probabilities)


def test_probabilities_given_as_numbers_are_checked_too():
    assert check_probabilities([0, 2.5]) == [0.0, 2.5]
    with pytest.raises(DataError):
        check_probabilities([1.0, math.nan])

"""Proofs of section 2.7: tokens of units, and how units and text are interleaved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from erniekit.config import Config
from erniekit.errors import UserError

Read = Callable[..., SimpleNamespace]
RECORDS = 40
SECONDS = 20


@pytest.fixture
def read_units(read_epoch: Read, tmp_path: Path) -> Read:
    """Read an epoch of 40 records of 20 s, in which a word is said each half second; `tokens` are the rows' ids."""
    words = [{"word": f"word{number}", "start": number / 2, "end": (number + 1) / 2} for number in range(2 * SECONDS)]
    record = {"units": [number % 7 for number in range(50 * SECONDS)], "words": words, "duration": SECONDS}
    path = tmp_path / "aligned.jsonl"
    path.write_text((json.dumps(record) + "\n") * RECORDS)

    def read(**values: Any) -> SimpleNamespace:
        fixed = {
            "stage": "PT", "train_dataset_path": str(path), "train_dataset_type": "aligned_units", "max_seq_len": 4096,
            "packing": False, "added_tokens": ["<|continue|>", "<|correspond|>"],
            "added_token_ranges": ["<|unit{0..6}|>"], "eval_dataset_path": "", "random_shuffle": False,
        }  # fmt: skip
        found = read_epoch(**{**fixed, **values})
        found.tokens = [row for step in found.steps for batch in step for row in batch.input_ids.tolist()]
        return found

    return read


def marks(found: SimpleNamespace, back: int) -> list[int]:
    """How often a token that was added stands in each row, counted from the last one."""
    last = max(max(row) for row in found.tokens)
    return [row.count(last - back) for row in found.tokens]


@pytest.mark.proves("unit_token")
@pytest.mark.proves("continue_token")
@pytest.mark.proves("correspond_token")
def test_units_and_marks_are_the_tokens_that_are_named(read_units: Read) -> None:
    usual = read_units()
    named = {
        "unit_token": "<u{}>", "continue_token": "<go>", "correspond_token": "<same>",
        "added_tokens": ["<go>", "<same>"], "added_token_ranges": ["<u{0..6}>"],
    }  # fmt: skip
    assert read_units(**named).tokens == usual.tokens  # the same places in the vocabulary
    swapped = read_units(continue_token="<|correspond|>", correspond_token="<|continue|>")
    assert marks(swapped, 7) == marks(usual, 8) != marks(usual, 7) == marks(swapped, 8)
    for name, written in (("unit_token", "<u{}>"), ("continue_token", "<go>"), ("correspond_token", "<same>")):
        with pytest.raises(UserError, match=f"has no token {written.replace('{}', '0')}"):
            read_units(**{name: written})


@pytest.mark.proves("interleave_segment_seconds")
def test_a_segment_has_about_so_many_seconds(read_units: Read) -> None:
    alone = {"interleave_text_probability": 0, "interleave_correspond_probability": 1}
    usual = read_units(**alone)  # 1,000 units are three parts of 10 s, 11 of 2 s; one of 30 s
    assert 2.5 * RECORDS < sum(marks(usual, 7)) <= 3 * RECORDS
    assert 6 * RECORDS < sum(marks(read_units(**alone, interleave_segment_seconds=2), 7)) <= 11 * RECORDS
    assert sum(marks(read_units(**alone, interleave_segment_seconds=30), 7)) == RECORDS


@pytest.mark.proves("interleave_text_probability")
def test_a_segment_is_text_with_this_probability(read_units: Read) -> None:
    def unit_tokens(probability: float) -> int:
        found = read_units(interleave_text_probability=probability, interleave_correspond_probability=0)
        return sum(sum(marks(found, back)) for back in range(7))

    assert unit_tokens(0) == 50 * SECONDS * RECORDS
    assert 0.55 < unit_tokens(0.3) / (50 * SECONDS * RECORDS) < 0.85
    only_text = read_units(interleave_text_probability=1, interleave_correspond_probability=0)
    last_unit = max(map(max, read_units(interleave_text_probability=0, interleave_correspond_probability=0).tokens))
    assert max(map(max, only_text.tokens)) < last_unit - 6


@pytest.mark.proves("interleave_correspond_probability")
def test_a_segment_is_followed_by_the_other_kind_with_this_probability(read_units: Read) -> None:
    never, often = (read_units(interleave_correspond_probability=probability) for probability in (0, 0.8))
    assert sum(marks(never, 7)) == 0
    assert 0.65 * 3 * RECORDS < sum(marks(often, 7)) < 0.95 * 3 * RECORDS


@pytest.mark.proves("units_per_second")
def test_the_rate_of_the_units_is_compared_with_the_duration(read_units: Read) -> None:
    with pytest.raises(UserError, match=r"aligned\.jsonl:1: duration: expected about 40\.00 s, of 1,000 units at 25"):
        read_units(units_per_second=25)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"interleave_segment_seconds": 0.01}, "less than one unit at 50 units per second.*write at least 0.02"),
        ({"unit_token": "<|unit|>"}, "has no place for the number"),
        ({"correspond_token": "<|continue|>"}, "is `continue_token`, too"),
        ({"continue_token": ""}, "the text of a token is missing"),
    ],
    ids=str,
)
def test_values_that_make_no_segments_are_refused(
    values: dict[str, Any], said: str, make_config: Callable[..., Config]
) -> None:
    with pytest.raises(UserError, match=said):
        make_config(**values)


def test_interleaving_without_aligned_units_has_no_effect(make_config: Callable[..., Config]) -> None:
    config = make_config(train_dataset_type="erniekit", interleave_text_probability=0.3)
    assert any(
        "interleave_text_probability" in line and "no data is of type aligned_units" in line for line in config.messages
    )

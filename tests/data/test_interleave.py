"""Interleaved speech and text: equal to an independent script, and what its draws promise."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.data.conversation import Source
from erniekit.data.dataset import Dataset, open_dataset
from erniekit.data.interleave import Interleaving, draw_segments, truncated_normal
from erniekit.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from erniekit.data.unit_tokens import unit_tokens
from erniekit.data.units import ALIGNED_UNITS
from tests.data.conftest import CONTROL_TOKENS, write_tokenizer
from tests.data.independent_interleaving import Interval, interleaved, random_alignment, words_on_units

UNITS = tuple(f"<|unit{number}|>" for number in range(100))
MARKS = ("<|continue|>", "<|correspond|>")
VOCABULARY = ["river", "The", "mill", "it's", "Mühle", "12,", "今天", "apples.", "a", "'tis", "x-ray", "bridge"]
STREAM = 3  # of the draws of segments


@pytest.fixture(scope="module")
def unit_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("units")
    return load_tokenizer(write_tokenizer(folder, (*CONTROL_TOKENS, *UNITS, *MARKS)))


def interleaving(tokenizer: Tokenizer, **changes: Any) -> Interleaving:
    values: dict[str, Any] = {
        "units_per_second": 50.0, "segment_units": 500.0, "text_probability": 0.5, "correspond_probability": 0.5,
        "seed": 42, "bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id, "max_seq_len": 8192, "truncates": True,
    }  # fmt: skip
    return Interleaving(unit_tokens(tokenizer, "<|unit{}|>", *MARKS), **{**values, **changes})


def record_of(grid: list[Interval], units: list[int]) -> dict[str, Any]:
    """A JSON record of intervals: the pauses are what is between the words."""
    words = [{"word": item["mark"], "start": item["begin"], "end": item["end"]} for item in grid if item["mark"]]
    return {"units": units, "words": words, "duration": grid[-1]["end"]}


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def open_aligned(path: Path, tokenizer: Tokenizer, cache: Path, **changes: Any) -> Dataset:
    settings = interleaving(tokenizer, **changes)
    over_length = "truncate_turns" if settings.truncates else "drop"
    return open_dataset(
        [Source(path, ALIGNED_UNITS)], tokenizer, None, max_seq_len=settings.max_seq_len, over_length=over_length,
        cache_dir=cache, interleaving=settings,
    )  # fmt: skip


def test_200_alignments_give_the_ids_and_labels_of_an_independent_script(
    unit_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    alignments = [random_alignment(seed, VOCABULARY) for seed in range(200)]
    path = write_records(tmp_path / "aligned.jsonl", [record_of(*item) for item in alignments])
    dataset = open_aligned(path, unit_tokenizer, tmp_path / "cache")
    ids = {token: unit_tokenizer.token_id(token) for token in (*UNITS, *MARKS)}
    for epoch in (0, 1, 7):
        stream = iter(np.random.default_rng((STREAM, 42, epoch, 0)).random(1_000_000).tolist())
        expected = []
        for grid, units in alignments:
            words = words_on_units(grid, len(units))
            if len(words) < 3:
                continue
            parts = int(len(units) // 500) + 1
            draws = iter([next(stream) for _ in range(3 * parts - 1)])
            expected.append(
                interleaved(
                    words, units, lambda text: unit_tokenizer.encode_batch([text])[0], draws, segment_units=500,
                    bos=unit_tokenizer.bos_id or 0, eos=unit_tokenizer.eos_id, go_on=ids["<|continue|>"] or 0,
                    same=ids["<|correspond|>"] or 0, unit_id=lambda unit: ids[f"<|unit{unit}|>"] or 0,
                )  # fmt: skip
            )
        assert len(expected) == len(dataset) > 190
        lengths = dataset.lengths_in(epoch)
        for number, tokens in enumerate(expected):
            sample = dataset.sample(number, epoch)
            assert tokens is not None
            assert sample.input_ids.tolist() == tokens[:-1]
            assert sample.labels.tolist() == tokens[1:]
            assert lengths[number] == len(tokens) - 1

"""Interleaved speech and text: equal to an independent script, and what its draws promise."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from erniekit.data.conversation import Source
from erniekit.data.dataset import Dataset
from erniekit.data.interleave import Interleaving, draw_segments, truncated_normal
from erniekit.data.open_dataset import open_dataset
from erniekit.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from erniekit.data.unit_tokens import unit_tokens
from erniekit.data.units import ALIGNED_UNITS
from tests.data.conftest import CONTROL_TOKENS, write_tokenizer
from tests.data.independent_interleaving import Interval, interleaved, quantile, random_alignment, words_on_units

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
        cache_dir=cache, drawing=settings,
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
                    words,
                    units,
                    lambda text: unit_tokenizer.encode_batch([text])[0],
                    draws,
                    segment_units=500,
                    bos=unit_tokenizer.bos_id or 0,
                    eos=unit_tokenizer.eos_id,
                    go_on=ids["<|continue|>"] or 0,
                    same=ids["<|correspond|>"] or 0,
                    unit_id=lambda unit: ids[f"<|unit{unit}|>"] or 0,
                )
            )
        assert len(expected) == len(dataset) > 190
        lengths = dataset.lengths_in(epoch)
        for number, tokens in enumerate(expected):
            sample = dataset.sample(number, epoch)
            assert tokens is not None
            assert sample.input_ids.tolist() == tokens[:-1]
            assert sample.labels.tolist() == tokens[1:]
            assert lengths[number] == len(tokens) - 1


def words_table(rng: np.random.Generator, count: int, units: int) -> np.ndarray:
    """int64[count, 3]: words that divide so many units, and their tokens."""
    ends = np.append(np.sort(rng.choice(np.arange(1, units), count - 1, replace=False)), units)
    behind = rng.integers(1, 5, count)
    return np.stack([ends, behind, behind + rng.integers(0, 2, count)], axis=1)


def test_segments_of_10_000_draws_cover_every_word_once_in_order(unit_tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(1)
    settings = interleaving(unit_tokenizer, text_probability=0.3, correspond_probability=0.8)
    tables = [words_table(rng, int(rng.integers(3, 80)), int(rng.integers(100, 4000))) for _ in range(10_000)]
    words = np.concatenate(tables)
    offsets = np.cumsum([0, *map(len, tables)])
    parts = np.array([int(table[-1, 0] // 500) + 1 for table in tables])
    found = draw_segments(words, offsets, rng.random(int((3 * parts - 1).sum())), settings)

    assert found.first.tolist() == [0, *found.stop[:-1].tolist()]  # without a gap, in order
    assert found.stop[-1] == len(words)
    assert (found.first < found.stop).all()
    assert set(offsets[:-1].tolist()) <= set(found.first.tolist())  # none has words of two samples
    counts = np.bincount(found.sample, minlength=len(tables))
    assert (counts >= 1).all()
    assert (counts <= parts).all()
    assert (counts == parts).mean() > 0.5
    assert (found.end == words[found.stop - 1, 0]).all()
    begins = np.append(0, words[:-1, 0])[found.first]
    begins[np.isin(found.first, offsets[:-1])] = 0
    assert (found.begin == begins).all()

    assert abs(found.is_text.mean() - 0.3) < 0.01
    assert abs(found.corresponds.mean() - 0.8) < 0.01
    last = np.where(found.corresponds, ~found.is_text, found.is_text)
    within = found.sample[1:] == found.sample[:-1]
    assert (found.continues[1:] == (within & (last[:-1] != found.is_text[1:]))).all()
    assert not found.continues[0]


def test_segments_of_a_probability_0_or_1_are_of_one_kind(unit_tokenizer: Tokenizer) -> None:
    table = words_table(np.random.default_rng(2), 50, 3000)
    draws = np.append(np.random.default_rng(3).random(18), [0.0, 0.999999])
    for text in (0.0, 1.0):
        settings = interleaving(unit_tokenizer, text_probability=text, correspond_probability=1 - text)
        found = draw_segments(table, np.array([0, 50]), draws, settings)
        assert (found.is_text == bool(text)).all()
        assert (found.corresponds == (not text)).all()
        assert found.continues.any() == (not text)


def test_borders_have_the_distribution_of_a_truncated_normal(unit_tokenizer: Tokenizer) -> None:
    """The figures of a normal distribution cut at two deviations: its variance is 0.7737 of the whole one's."""
    uniform = np.random.default_rng(4).random(200_000)
    drawn = truncated_normal(uniform)
    assert np.abs(drawn).max() < 2
    assert abs(drawn.mean()) < 0.01
    phi = math.exp(-2) / math.sqrt(2 * math.pi)
    assert abs(drawn.var() - (1 - 4 * phi / math.erf(math.sqrt(2)))) < 0.01
    assert abs((np.abs(drawn) < 1).mean() - math.erf(math.sqrt(0.5)) / math.erf(math.sqrt(2))) < 0.005
    assert np.abs(drawn[:100] - [quantile(float(value), 2.0) for value in uniform[:100]]).max() < 1e-12

    # Through the cutting: a word for each unit of 1,200, three parts, so borders around 400 and 800 with deviation 200.
    ends = np.arange(1, 1201)
    table = np.stack([ends, np.ones(1200), np.ones(1200)], axis=1).astype(np.int64)
    repeats = 2000
    found = draw_segments(
        np.tile(table, (repeats, 1)), np.arange(repeats + 1) * 1200, np.random.default_rng(5).random(8 * repeats),
        interleaving(unit_tokenizer),
    )  # fmt: skip
    three = np.bincount(found.sample) == 3
    begins = found.begin.reshape(-1) if three.all() else found.begin[three[found.sample]]
    borders = begins.reshape(-1, 3)[:, 1:]
    assert three.mean() > 0.99
    assert abs(borders.mean() - 600) < 10
    assert borders.min() >= 0
    assert borders.max() <= 1200


@pytest.fixture(scope="module")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = [record_of(*random_alignment(seed, VOCABULARY)) for seed in range(60)]
    return write_records(tmp_path_factory.mktemp("aligned") / "aligned.jsonl", records)


def everything(dataset: Dataset, epoch: int) -> list[list[int]]:
    return [dataset.sample(number, epoch).input_ids.tolist() for number in range(len(dataset))]


def test_an_epoch_is_drawn_again_as_it_was_and_others_differ(
    unit_tokenizer: Tokenizer, aligned: Path, tmp_path: Path
) -> None:
    dataset, again = (open_aligned(aligned, unit_tokenizer, tmp_path) for _ in range(2))
    first, second = everything(dataset, 0), everything(dataset, 1)
    assert everything(again, 1) == second
    assert [again.sample(number, 0).input_ids.tolist() for number in reversed(range(len(again)))] == first[::-1]
    assert sum(one != other for one, other in zip(first, second, strict=True)) > 0.7 * len(first)
    assert dataset.lengths_in(1).tolist() == [len(ids) for ids in second]
    assert dataset.lengths.tolist() == [len(ids) for ids in first]
    assert (dataset.longest >= np.maximum(dataset.lengths_in(0), dataset.lengths_in(1))).all()
    other = open_aligned(aligned, unit_tokenizer, tmp_path, seed=43)
    assert everything(other, 0) != first
    assert other.fingerprint != dataset.fingerprint == again.fingerprint


def test_lengths_in_blocks_are_those_of_all_at_once(
    unit_tokenizer: Tokenizer, aligned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = open_aligned(aligned, unit_tokenizer, tmp_path).lengths_in(3)
    monkeypatch.setattr("erniekit.data.interleave.BLOCK_WORDS", 50)
    assert open_aligned(aligned, unit_tokenizer, tmp_path).lengths_in(3).tolist() == whole.tolist()


@pytest.mark.parametrize("truncates", [True, False])
def test_samples_that_come_out_too_long(
    truncates: bool, unit_tokenizer: Tokenizer, aligned: Path, tmp_path: Path
) -> None:
    """They lose their oldest segments, or are left out of the epoch; what fits is as it would be without a limit."""
    free = open_aligned(aligned, unit_tokenizer, tmp_path)
    limited = open_aligned(aligned, unit_tokenizer, tmp_path, max_seq_len=600, truncates=truncates)
    assert len(limited) == len(free)
    left_out, shortened = limited.too_long_in(2)
    lengths = limited.lengths_in(2)
    assert left_out == (lengths == 0).sum() > 0
    assert (shortened > 0) == truncates
    for number in range(len(free)):
        full, kept = free.sample(number, 2), limited.sample(number, 2)
        assert len(kept.input_ids) == lengths[number] <= 600
        if len(full.input_ids) <= 600:
            assert kept.input_ids.tolist() == full.input_ids.tolist()
        elif lengths[number]:
            assert truncates
            tail = kept.input_ids[1:].tolist()
            assert full.input_ids.tolist()[-len(tail) :] == tail
            assert kept.input_ids[0] == unit_tokenizer.bos_id
            assert unit_tokenizer.token_id(MARKS[0]) != tail[0]  # nothing stands before it that would go on

"""Proofs of section 1.7: how samples become rows, and who prepares them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.config.observing import recorded

Train = Callable[..., Any]
Read = Callable[..., SimpleNamespace]
GROUPED = {"batch_tokens": 256}


@pytest.mark.proves("packing")
def test_rows_hold_several_samples_or_one(read_epoch: Read) -> None:
    assert len(read_epoch().rows) == 16
    alone = read_epoch(packing=False)
    assert [len(row) for row in alone.rows] == [1] * 60
    for step in alone.steps:  # padded to the longest of its batch
        for batch in step:
            assert batch.input_ids.shape[1] == max(alone.lengths[sample] for (sample,) in batch.samples)


@pytest.mark.proves("greedy_intokens", "buffer_size")
def test_the_packer_chooses_from_its_window(read_epoch: Read) -> None:
    in_order = read_epoch(greedy_intokens=False, random_shuffle=False)
    assert in_order.order == list(range(60))
    window = read_epoch(buffer_size=10, random_shuffle=False)
    assert [sorted(window.order[start : start + 10]) for start in range(0, 60, 10)] == [
        list(range(start, start + 10)) for start in range(0, 60, 10)
    ]
    greedy = read_epoch()
    assert len(greedy.rows) < len(window.rows) and len(greedy.rows) <= len(in_order.rows)


@pytest.mark.proves("batch_tokens", "max_batch_samples")
def test_rows_of_similar_length_fill_a_budget(read_epoch: Read) -> None:
    for asked in (GROUPED, {"batch_tokens": 512}):
        shapes = [batch.input_ids.shape for step in read_epoch(**asked).steps for batch in step]
        assert all(rows * width <= asked["batch_tokens"] for rows, width in shapes)
        assert max(rows * width for rows, width in shapes) > 0.9 * asked["batch_tokens"]
    few = read_epoch(**GROUPED, max_batch_samples=3)
    assert max(batch.input_ids.shape[0] for step in few.steps for batch in step) == 3


@pytest.mark.proves("min_sample_len", "max_sample_len")
def test_samples_of_other_lengths_are_left_out(read_epoch: Read) -> None:
    every = read_epoch(**GROUPED)
    long = read_epoch(**GROUPED, min_sample_len=30)
    short = read_epoch(**GROUPED, max_sample_len=29)
    assert set(long.order) == {sample for sample in every.order if every.lengths[sample] >= 30}
    assert set(short.order) == {sample for sample in every.order if every.lengths[sample] <= 29}
    assert f"left out: {len(short.order)} samples shorter than 30" in long.reported
    assert long.order and short.order


@pytest.mark.proves("dataloader_num_workers")
def test_workers_prepare_batches_and_change_no_loss(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = recorded("erniekit.runners.train.prefetch", "workers", monkeypatch)
    losses = [train(dataloader_num_workers=count).losses for count in (0, 1, 3)]
    assert workers == [0, 1, 3]
    np.testing.assert_equal(losses[1:], [losses[0]] * 2)

"""Batches of codes: columns of rows that are read both ways, arrays of codes, padding and what is sent."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.data.batch import Batch, CodePart
from erniekit.data.collate import collate
from erniekit.data.loader import ArrayMessage, deserialize_batches, serialize_batches
from erniekit.data.templates.ernie import IGNORE_INDEX, Sample

PAD, LEVELS = 99, 3
ARRAYS = ("codes", "code_labels", "code_part")


def spoken(text: int, frames: int, *, causal: bool = False, **more: np.ndarray) -> Sample:
    """A sample of `text` tokens, then `frames` frames, of which every second one has a target of level 0."""
    length = text + frames
    codes = np.full((length, LEVELS), -1, np.int64)
    codes[text:] = np.arange(frames * LEVELS).reshape(frames, LEVELS)
    labels = np.full((length, LEVELS), IGNORE_INDEX, np.int64)
    labels[text::2, 0] = 7
    arrays = {"codes": codes, "code_labels": labels, "code_part": np.full(length, CodePart.RESPONSE, np.int8), **more}
    ids, none = np.ones(length, np.int32), np.full(length, IGNORE_INDEX, np.int32)
    return Sample(ids, none, arrays=arrays, causal=causal, seconds=frames / 4)


def codes_batch(rows: list[list[Sample]]) -> Batch:
    numbers = [list(range(len(row))) for row in rows]
    return collate(rows, numbers, PAD, arrays=ARRAYS, both_ways=True, levels=LEVELS)


def visible(batch: Batch, row: int) -> np.ndarray:
    """bool[S, S]: which row (first axis) sees which column, by FlashMask's form without causality."""
    indices = batch.startend_row_indices[row, 0]
    queries = np.arange(batch.shape[1])[:, None]
    return (queries >= indices[:, 1]) & (queries < indices[:, 0])


def expected_mask(documents: list[Sample], length: int) -> np.ndarray:
    mask, start = np.zeros((length, length), bool), 0
    for sample in documents:
        size = len(sample.input_ids)
        block = np.tri(size, dtype=bool) if sample.causal else np.ones((size, size), bool)
        mask[start : start + size, start : start + size] = block
        start += size
    return mask


DOCUMENTS = st.builds(spoken, st.integers(0, 4), st.integers(1, 5), causal=st.booleans())


@settings(deadline=None, derandomize=True)
@given(st.lists(st.lists(DOCUMENTS, max_size=4), min_size=1, max_size=3), st.integers(0, 2), st.integers(0, 5))
def test_columns_are_those_of_a_dense_mask_and_padding_is_unseen(
    rows: list[list[Sample]], more_rows: int, more_length: int
) -> None:
    batch = codes_batch(rows)
    padded = batch.padded(batch.shape[0] + more_rows, batch.shape[1] + more_length)
    for found in (batch, padded):
        assert found.startend_row_indices.shape == (found.shape[0], 1, found.shape[1], 2)
        for number in range(found.shape[0]):
            documents = rows[number] if number < len(rows) else []
            np.testing.assert_array_equal(visible(found, number), expected_mask(documents, found.shape[1]))
            assert found.is_token[number].sum() == sum(len(sample.input_ids) for sample in documents)


def test_a_causal_run_has_columns_of_one_value() -> None:
    sample = Sample(np.array([1, 2], np.int32), np.array([2, 3], np.int32))
    assert collate([[sample]], [[0]], PAD).startend_row_indices.tolist() == [[[[2], [2]]]]


def test_codes_lie_at_their_positions_and_count_as_targets() -> None:
    batch = codes_batch([[spoken(2, 3), spoken(1, 1)], [spoken(1, 2)]])
    view = batch.codes_view
    assert view is not None and view.part is not None
    assert view.codes.dtype == view.labels.dtype == np.int64 and view.codes.shape == (2, 7, LEVELS)
    assert view.codes[0, 2:5].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert (view.codes[0, :2] == -1).all() and (view.codes[1, 3:] == -1).all()
    assert view.counts.tolist() == [4, 0, 0] and batch.target_count == 4
    assert batch.input_ids.tolist() == [[1, 1, PAD, PAD, PAD, 1, PAD], [1] + [PAD] * 6]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 0, 0, 0, 0]]
    assert view.part[1].tolist() == [3, 3, 3, 0, 0, 0, 0]
    assert batch.seconds == batch.audio_seconds == 6 / 4


def test_labels_of_tokens_count_beside_those_of_codes() -> None:
    plain = spoken(2, 3)
    labels = np.array([5, 6, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX], np.int32)
    both = Sample(plain.input_ids, labels, arrays=plain.arrays)
    assert codes_batch([[both]]).target_count == 4


def test_a_sample_may_bring_its_positions() -> None:
    batch = codes_batch([[spoken(2, 2, position_ids=np.array([0, 1, 0, 1])), spoken(1, 1)]])
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 0, 1]]


def test_a_batch_without_samples_has_the_arrays_of_its_run() -> None:
    batch = codes_batch([[]])
    assert batch.arrays["codes"].tolist() == [[[-1] * LEVELS]]
    assert batch.startend_row_indices.tolist() == [[[[0, 0]]]]
    assert batch.codes_view is not None and batch.codes_view.counts.tolist() == [0] * LEVELS
    assert (batch.target_count, batch.seconds) == (0, 0.0)


def test_other_batches_have_no_codes() -> None:
    assert collate([[]], [[]], PAD).codes_view is None


def test_batches_of_codes_arrive_as_they_were_sent() -> None:
    batch = codes_batch([[spoken(2, 3, causal=True), spoken(1, 1)], []])
    metadata, arrays = serialize_batches([batch])
    received = deserialize_batches(ArrayMessage(json.loads(json.dumps(metadata)), arrays))[0]
    assert (received.seconds, received.target_count, received.samples) == (1.0, batch.target_count, batch.samples)
    for name, array in batch.arrays.items():
        np.testing.assert_array_equal(received.arrays[name], array, err_msg=name)


def test_samples_that_are_read_both_ways_need_columns_of_two_values() -> None:
    with pytest.raises(AssertionError, match="columns of one value"):
        collate([[spoken(1, 1)]], [[0]], PAD, arrays=ARRAYS)

from __future__ import annotations

import numpy as np

from erniekit.data.collate import collate
from erniekit.data.pairs import EncodedAnswer, join_pair
from erniekit.data.templates.ernie import IGNORE_INDEX, Sample

PAD = 99


def sample(tokens, labels):
    return Sample(np.array(tokens, dtype=np.int32), np.array(labels, dtype=np.int32))


A = sample([1, 2, 3], [IGNORE_INDEX, 3, 4])
B = sample([5, 6], [6, 7])
C = sample([8], [9])


def test_documents_lie_end_to_end_and_positions_restart():
    batch = collate([[A, B], [C]], [[10, 11], [12]], PAD)
    assert batch.input_ids.tolist() == [[1, 2, 3, 5, 6], [8, PAD, PAD, PAD, PAD]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 0, 0, 0, 0]]
    assert batch.labels.tolist() == [[-100, 3, 4, 6, 7], [9, -100, -100, -100, -100]]
    assert batch.startend_row_indices[:, 0, :, 0].tolist() == [[3, 3, 3, 5, 5], [1, 1, 1, 1, 1]]
    assert batch.samples == ((10, 11), (12,))
    assert (batch.token_count, batch.target_count) == (6, 5)


def test_types_and_shapes():
    batch = collate([[A, B], [C]], [[0, 1], [2]], PAD)
    for array in (batch.input_ids, batch.position_ids, batch.labels):
        assert (array.dtype, array.shape) == (np.int64, (2, 5))
    assert (batch.startend_row_indices.dtype, batch.startend_row_indices.shape) == (np.int32, (2, 1, 5, 1))


def test_indices_are_causal_within_a_document_and_hide_padding():
    batch = collate([[A, B, C], [B]], [[0, 1, 2], [1]], PAD)
    for row, documents in enumerate([[0, 0, 0, 1, 1, 2], [0, 0, None, None, None, None]]):
        first_blind = batch.startend_row_indices[row, 0, :, 0]
        for query in range(6):
            sees = [key for key in range(query + 1) if query < first_blind[key]]
            expected = [
                key for key in range(query + 1) if documents[key] == documents[query] and documents[query] is not None
            ]
            assert sees == expected


def test_a_row_without_documents_is_padding_only():
    batch = collate([[]], [[]], PAD)
    assert batch.input_ids.tolist() == [[PAD]]
    assert batch.startend_row_indices.tolist() == [[[[0]]]]
    assert (batch.target_count, batch.token_count, batch.samples) == (0, 0, ((),))


def test_padding_up_to_a_shape_is_what_laying_out_beside_longer_rows_gives():
    short, shape = collate([[A, B], [C]], [[0, 1], [2]], 0), (3, 7)
    beside = collate([[A, B], [C], [sample([1] * 7, [1] * 7)]], [[0, 1], [2], [3]], 0)
    padded = short.padded(*shape)
    for name in ("input_ids", "position_ids", "labels", "startend_row_indices"):
        found = getattr(padded, name)
        np.testing.assert_array_equal(found[:2], getattr(beside, name)[:2], err_msg=name)
        assert found.dtype == getattr(short, name).dtype
    assert not padded.is_token[2].any() and (padded.labels[2] == IGNORE_INDEX).all()
    assert padded.samples == ((0, 1), (2,), ())
    assert (padded.token_count, padded.target_count) == (short.token_count, short.target_count)


def test_padding_belongs_to_no_answer():
    pair = join_pair([1], EncodedAnswer([2], [2]), EncodedAnswer([3, 4], [3, 4]))
    padded = collate([[pair]], [[0]], 0, pairs=True).padded(2, 8)
    assert padded.pairs.count == 1 and padded.pairs.answers.shape == (2, 8)
    assert ((padded.pairs.answers >= 0) == (padded.labels != IGNORE_INDEX)).all()

"""The arrays of a batch: each is padded and serialised by its own rule, and none is listed anywhere else."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from erniekit.data.batch import ARRAY_SPECS, ArraySpec, Batch, register_array
from erniekit.data.collate import collate
from erniekit.data.loader import ArrayMessage, deserialize_batches, serialize_batches
from erniekit.data.pairs import EncodedAnswer, join_pair
from erniekit.data.templates.ernie import IGNORE_INDEX, Sample

MORE_SPECS = {
    "pitches": ArraySpec("int16", "BSC", 7),
    "advantages": ArraySpec("float32", "BS", 0.0),
    "row_weights": ArraySpec("float64", "B", 1.0),
    "sound_features": ArraySpec("float32", "NFD", 0.0),
    "audio_places": ArraySpec("int32", "N2", 0),
    "is_speech": ArraySpec("bool", "SB", False),
}


@pytest.fixture(autouse=True, scope="module")
def more_arrays():
    """Arrays that the package does not know, for the tests of this module."""
    for name, spec in MORE_SPECS.items():
        register_array(name, spec)
    yield
    for name in MORE_SPECS:
        del ARRAY_SPECS[name]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Documents or pairs in a few rows, and any of the further arrays."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pairs = draw(st.booleans())
    counts = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))

    def sample() -> Sample:
        prompt, one, other = (random.integers(1, 50, int(size)).tolist() for size in random.integers(1, 5, 3))
        if pairs:
            return join_pair(prompt, EncodedAnswer(one, one), EncodedAnswer(other, other), float(random.normal()))
        return Sample(np.array(prompt, np.int32), np.array(prompt, np.int32))

    rows = [[sample() for _ in range(count)] for count in counts]
    batch = collate(rows, [range(len(row)) for row in rows], 0, pairs=pairs)
    letters = dict(zip("BS", batch.shape, strict=True)) | {"2": 2}
    names = draw(st.lists(st.sampled_from(sorted(MORE_SPECS)), unique=True))
    more = {}
    for name in names:
        spec = MORE_SPECS[name]
        shape = [letters.get(axis, draw(st.integers(0, 3))) for axis in spec.axes]
        more[name] = random.integers(0, 9, shape).astype(spec.dtype)
    return batch.with_arrays(**more)


@given(batches(), st.integers(0, 3), st.integers(0, 5))
def test_padding_keeps_what_is_there_and_adds_the_pad_value(batch: Batch, more_rows: int, more_length: int) -> None:
    rows, length = batch.shape
    padded = batch.padded(rows + more_rows, length + more_length)
    assert padded.shape == (rows + more_rows, length + more_length)
    assert padded.arrays.keys() == batch.arrays.keys()
    sizes = {"B": rows, "S": length}
    for name, array in padded.arrays.items():
        spec, own = ARRAY_SPECS[name], batch.arrays[name]
        kept = tuple(slice(sizes.get(axis)) for axis in spec.axes)
        assert array.dtype == own.dtype
        np.testing.assert_array_equal(array[kept], own, err_msg=name)
        if not callable(spec.pad):
            added = np.ones(array.shape, bool)
            added[kept] = False
            assert (array[added] == spec.pad).all(), name
    np.testing.assert_array_equal(padded.is_token[:rows, :length], batch.is_token)
    assert padded.is_token.sum() == batch.is_token.sum() == batch.token_count
    assert (padded.token_count, padded.target_count) == (batch.token_count, batch.target_count)
    assert padded.samples == batch.samples + ((),) * more_rows


@given(batches(), st.tuples(st.integers(0, 2), st.integers(0, 3)), st.tuples(st.integers(0, 2), st.integers(0, 3)))
def test_padding_twice_is_padding_once(batch: Batch, first: tuple[int, int], second: tuple[int, int]) -> None:
    rows, length = batch.shape
    once = batch.padded(rows + first[0] + second[0], length + first[1] + second[1])
    between = batch.padded(rows + first[0], length + first[1])
    twice = between.padded(*once.shape)
    assert twice.samples == once.samples
    for name, array in once.arrays.items():
        np.testing.assert_array_equal(twice.arrays[name], array, err_msg=name)


@given(st.lists(batches(), max_size=3))
def test_batches_arrive_as_they_were_serialised(sent: list[Batch]) -> None:
    metadata, arrays = serialize_batches(sent)
    received = deserialize_batches(ArrayMessage(json.loads(json.dumps(metadata)), [array.copy() for array in arrays]))
    assert len(received) == len(sent)
    for own, other in zip(sent, received, strict=True):
        assert (other.samples, other.token_count, other.target_count) == (
            own.samples, own.token_count, own.target_count,
        )  # fmt: skip
        assert list(other.arrays) == list(own.arrays)
        for name, array in own.arrays.items():
            assert other.arrays[name].dtype == array.dtype
            np.testing.assert_array_equal(other.arrays[name], array, err_msg=name)


def test_further_arrays_of_samples_lie_at_their_positions() -> None:
    def sample(size: int, first_pitch: int, **more: np.ndarray) -> Sample:
        pitches = np.arange(first_pitch, first_pitch + 2 * size, dtype=np.int16).reshape(size, 2)
        ids = np.arange(size, dtype=np.int32)
        return Sample(ids, ids, arrays={"pitches": pitches, **more})

    advantages = np.array([0.5, -1.0], np.float32)
    rows = [[sample(2, 10, advantages=advantages), sample(1, 20)], [sample(1, 30)], []]
    batch = collate(rows, [[0, 1], [2], []], 0, arrays=["pitches", "advantages"])
    assert batch.arrays["pitches"].tolist() == [
        [[10, 11], [12, 13], [20, 21]],
        [[30, 31], [7, 7], [7, 7]],
        [[7, 7], [7, 7], [7, 7]],
    ]
    assert batch.arrays["advantages"].tolist() == [[0.5, -1.0, 0.0], [0.0] * 3, [0.0] * 3]
    nothing = collate([[]], [[]], 0, arrays=["pitches", "advantages"])
    assert nothing.arrays["pitches"].shape == (1, 1, 0) and nothing.arrays["advantages"].tolist() == [[0.0]]
    with pytest.raises(ValueError, match=r"batch array 'row_weights': its axes are B"):
        collate(rows, [[0, 1], [2], []], 0, arrays=["row_weights"])


def document_batch() -> Batch:
    sample = Sample(np.array([1, 2], np.int32), np.array([2, IGNORE_INDEX], np.int32))
    return collate([[sample]], [[0]], 0)


def test_an_array_without_a_pad_rule_is_named() -> None:
    with pytest.raises(ValueError, match=r"batch array 'spectrum': it has no pad rule; add one with register_array"):
        document_batch().with_arrays(spectrum=np.zeros((1, 2), np.float32))
    with pytest.raises(ValueError, match="batch array 'spectrum'"):
        collate([[]], [[]], 0, arrays=["spectrum"])


@pytest.mark.parametrize(
    "array", [np.zeros((1, 2), np.float64), np.zeros((1, 3), np.float32), np.zeros((1, 2, 1), np.float32)]
)
def test_an_array_that_does_not_follow_its_specification_is_named(array: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"batch array 'advantages': .* is not float32 with the axes BS"):
        document_batch().with_arrays(advantages=array)


def test_a_name_has_one_specification() -> None:
    register_array("pitches", MORE_SPECS["pitches"])
    with pytest.raises(ValueError, match="batch array 'pitches': registered already"):
        register_array("pitches", ArraySpec("int16", "BSC", 0))

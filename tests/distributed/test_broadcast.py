"""Arrays from one rank to the others of its group."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from erniekit.distributed.broadcast import _from_bytes, _to_bytes, broadcast_arrays
from tests.distributed.cases import broadcast
from tests.distributed.ranks import run_ranks


@pytest.mark.distributed
def test_the_others_of_a_group_have_what_its_first_rank_has() -> None:
    assert run_ranks(broadcast.broadcast_in_two_groups, 4) == [[6, 6, 6]] * 4


def test_a_rank_alone_keeps_what_it_has() -> None:
    metadata, (array,) = broadcast_arrays({"a": 1}, [np.arange(3)], None)
    assert metadata == {"a": 1} and array.tolist() == [0, 1, 2]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["bool", "uint8", "int16", "int32", "int64", "float32", "float64"]),
            st.lists(st.integers(0, 4), max_size=4),
        ),
        max_size=6,
    ),
    st.lists(st.none() | st.integers() | st.text(), max_size=3),
)
def test_bytes_hold_arrays_of_any_type_and_shape(kinds: list, metadata: object) -> None:
    random = np.random.default_rng(len(kinds))
    arrays = [random.integers(0, 200, shape).astype(dtype) for dtype, shape in kinds]
    found_metadata, found = _from_bytes(np.frombuffer(_to_bytes(metadata, arrays), np.uint8))
    assert found_metadata == metadata and len(found) == len(arrays)
    for own, other in zip(arrays, found, strict=True):
        assert other.dtype == own.dtype
        np.testing.assert_array_equal(other, own)

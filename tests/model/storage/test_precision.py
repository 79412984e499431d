"""Rounding weights to the types they are stored in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from erniekit.errors import ModelFileError
from erniekit.model.storage.precision import round_to_bfloat16, to_stored


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(arrays.arrays(np.uint32, st.integers(1, 40)))
def test_bfloat16_is_the_nearest_and_of_two_the_even_one(bits: np.ndarray) -> None:
    """Every float32 lies between its upper half and the next one up in magnitude; compare the distances exactly."""
    values = bits.view(np.float32)
    rounded = round_to_bfloat16(values)
    for value, found in zip(values, rounded, strict=True):
        if np.isnan(value):
            assert np.isnan(widened(np.array([found]))[0])
            continue
        below = np.uint32(int(value.view(np.uint32)) >> 16)
        above = below + 1
        lower, upper = (float(widened(np.array([half]))[0]) for half in (below, above))
        if np.isinf(upper):  # beyond the largest bfloat16 the next step counts as 2^128
            upper = float(np.sign(value)) * 2.0**128
        if np.isinf(value):
            assert found == below
            continue
        down, up = abs(float(value) - lower), abs(upper - float(value))
        expected = below if down < up or (down == up and below % 2 == 0) else above
        assert found == expected, (value, found, expected)


def test_known_cases() -> None:
    cases = {0x3F800000: 0x3F80, 0x3F808000: 0x3F80, 0x3F818000: 0x3F82, 0x3F808001: 0x3F81, 0xBF818000: 0xBF82}
    cases |= {0x7F7FFFFF: 0x7F80, 0x00000001: 0x0000, 0x80000000: 0x8000, 0x7F800001: 0x7FC0, 0xFF800000: 0xFF80}
    values = np.array(list(cases), np.uint32).view(np.float32)
    assert round_to_bfloat16(values).tolist() == list(cases.values())


def test_values_that_do_not_fit_are_refused_by_name() -> None:
    assert to_stored("w", np.array([65504.0, np.inf, np.nan], np.float32), "F16").dtype == np.float16
    with pytest.raises(ModelFileError, match=r"w contains 65520, beyond the range of float16; use --dtype bfloat16"):
        to_stored("w", np.array([1.0, -65520.0], np.float32), "F16")
    with pytest.raises(ModelFileError, match="use --dtype float32"):
        to_stored("w", np.array([3.4e38], np.float32), "BF16")
    with pytest.raises(ValueError, match="stored as one of"):
        to_stored("w", np.zeros(1, np.float32), "I8")


def test_any_memory_layout_and_precision_is_taken() -> None:
    values = np.arange(12, dtype=np.float64).reshape(3, 4).T / 7
    for dtype, expected in (("F32", np.float32), ("F16", np.float16)):
        stored = to_stored("w", values, dtype)
        assert stored.flags.c_contiguous and stored.shape == (4, 3)
        np.testing.assert_array_equal(stored, values.astype(np.float32).astype(expected))

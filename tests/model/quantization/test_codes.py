"""Weights in few bits: codes against brute force, levels against their definition, bounds of the error."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.errors import ModelFileError
from erniekit.model.quantization.codes import QuantizedTensor, dequantize, quantize, slice_quantized
from erniekit.model.quantization.formats import INT4, INT8, NF4, NORMAL_FLOAT

FORMATS = (INT8, INT4, NF4)


def _weight(outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((outputs, inputs)) * 0.02).astype(np.float32)


def _unpacked(packed: QuantizedTensor, bits: int) -> np.ndarray:
    if bits == 8:
        return packed.codes.astype(int)
    codes = np.empty((packed.codes.shape[0], 2 * packed.codes.shape[1]), int)
    codes[:, 0::2], codes[:, 1::2] = packed.codes % 16, packed.codes // 16
    return codes


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_every_code_is_the_nearest_of_all(form) -> None:
    values = _weight(6, 128)
    packed = quantize(values, form)
    group = 128 if form is INT8 else 64
    levels = np.arange(-127, 128) if form is INT8 else np.array(form.levels)
    for row, column in np.ndindex(values.shape):
        block = values[row, column // group * group :][:group]
        scale = np.abs(block).max() / levels.max()
        error = np.abs(levels * scale - values[row, column])
        code = _unpacked(packed, form.bits)[row, column] + (127 if form is INT8 else 0)
        assert error[code] <= error.min() * (1 + 1e-4) + 1e-9
        assert dequantize(packed, form)[row, column] == pytest.approx(levels[code] * scale, rel=1e-5, abs=1e-9)


def test_the_levels_of_normal_float_are_quantiles() -> None:
    """Eight of the upper half from 1/2 to 0.9677083, seven of the lower one and zero, divided by the largest."""
    quantile = NormalDist().inv_cdf
    upper = [quantile(p) for p in np.linspace(0.9677083, 0.5, 9)[:-1]]
    lower = [-quantile(p) for p in np.linspace(0.9677083, 0.5, 8)[:-1]]
    levels = np.sort([*upper, 0.0, *lower]) / max(upper)
    np.testing.assert_allclose(NORMAL_FLOAT, levels, atol=2e-6)


@pytest.mark.parametrize(("form", "bound", "bits"), [(INT8, 1e-4, 8.1), (INT4, 1.5e-2, 4.6), (NF4, 1e-2, 4.6)])
def test_error_and_size(form, bound: float, bits: float) -> None:
    values = _weight(64, 1024)
    packed = quantize(values, form)
    error = np.square(dequantize(packed, form) - values).mean() / np.square(values).mean()
    assert error < bound
    assert packed.nbytes == form.nbytes(64, 1024) < bits * values.size / 8


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    form=st.sampled_from(FORMATS),
    outputs=st.integers(1, 5),
    inputs=st.sampled_from([2, 6, 24, 64, 96, 320]),
    seed=st.integers(0, 99),
)
def test_what_was_quantised_stays_as_it_is(form, outputs: int, inputs: int, seed: int) -> None:
    values = _weight(outputs, inputs, seed)
    values[0] = 0.0
    once = dequantize(quantize(values, form), form)
    assert not once[0].any()
    np.testing.assert_allclose(dequantize(quantize(once, form), form), once, rtol=1e-6)
    by_group = np.abs(values).reshape(outputs, -1, form.group(inputs)).max(2)
    np.testing.assert_allclose(np.abs(once).reshape(outputs, -1, form.group(inputs)).max(2), by_group, rtol=1e-6)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_slice_has_the_scales_of_the_whole(form, axis: int) -> None:
    values = _weight(8, 256)
    values[:, 200] = 1.0  # all of it in one half
    packed, whole = quantize(values, form), dequantize(quantize(values, form), form)
    half = values.shape[axis] // 2
    parts = [slice_quantized(packed, form, axis, range(start, start + half), 256) for start in (0, half)]
    np.testing.assert_array_equal(np.concatenate([dequantize(part, form) for part in parts], axis), whole)


def test_groups_are_not_divided() -> None:
    assert INT4.divides(256, 4) and not INT4.divides(256, 8)
    assert INT8.divides(256, 8) and not INT8.divides(256, 3)
    assert INT4.group(96) == 32 and INT8.group(96) == 96


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_damaged_weights_are_refused(form, wrong: float) -> None:
    values = _weight(4, 64)
    values[2, 3] = wrong
    with pytest.raises(ModelFileError, match=r"q_proj\.weight: contains values that are not finite"):
        quantize(values, form, "q_proj.weight")


def test_odd_inputs_cannot_share_bytes() -> None:
    quantize(_weight(2, 7), INT8)
    with pytest.raises(ModelFileError, match="7 inputs"):
        quantize(_weight(2, 7), NF4)

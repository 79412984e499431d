"""Moments in 8 or 4 bits: how far what comes back may be from what went in, whatever went in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from erniekit.training.checkpoint import quantized_state
from erniekit.training.checkpoint.quantized_state import (
    FORMATS,
    O1,
    O2,
    MomentFormat,
    NotEncodableError,
    decode_first,
    decode_second,
    encode_first,
    encode_second,
)

LARGEST = float(np.finfo(np.float32).max)
BOTH = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
SHAPES = arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=13)


def round_trip(moment1: np.ndarray, moment2: np.ndarray, form: MomentFormat) -> tuple[np.ndarray, np.ndarray]:
    roots = encode_second(moment2, form)
    steps = encode_first(moment1, roots, form)
    return decode_first(steps, roots, moment1.shape, form), decode_second(roots, moment2.shape, form)


def in_blocks(values: np.ndarray, form: MomentFormat) -> np.ndarray:
    flat = values.reshape(-1)
    return np.pad(flat, (0, -flat.size % form.block_size)).reshape(-1, form.block_size).astype(np.float64)


def moments_of(gradients: np.ndarray, beta1: float = 0.9, beta2: float = 0.999) -> tuple[np.ndarray, np.ndarray]:
    """AdamW's moments after gradients [steps, ...], float32."""
    moment1 = moment2 = np.zeros(gradients.shape[1:], np.float32)
    for gradient in gradients.astype(np.float32):
        moment1 = (beta1 * moment1 + (1 - beta1) * gradient).astype(np.float32)
        moment2 = (beta2 * moment2 + (1 - beta2) * gradient * gradient).astype(np.float32)
    return moment1, moment2


@BOTH
@given(data=st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_second_moment_keeps_its_ratio_and_stays_above_zero(form: MomentFormat, data: st.DataObject) -> None:
    above = st.floats(0, LARGEST, width=32) | st.floats(0, 2**-40, width=32)
    moment2 = data.draw(arrays.arrays(np.float32, SHAPES, elements=above))
    back = decode_second(encode_second(moment2, form), moment2.shape, form)
    assert back.dtype == np.float32 and back.shape == moment2.shape and np.isfinite(back).all()
    assert ((back > 0) == (moment2 > 0)).all()
    if not moment2.size:
        return
    roots, there = in_blocks(np.sqrt(moment2), form), in_blocks(moment2, form) > 0
    low = np.where(there, roots, np.inf).min(axis=1, keepdims=True)
    spread = np.log(np.where(there, roots, 1).max(axis=1, keepdims=True) / np.where(np.isfinite(low), low, 1))
    normal = there & (in_blocks(moment2, form) > 1e-36)  # below, squares of float32 have few digits themselves
    wrong = np.abs(np.log(np.where(normal, in_blocks(np.sqrt(back), form), 1) / np.where(normal, roots, 1)))
    half_a_ratio = (
        (np.maximum(spread, 0) + 2 * np.log(1 + 2**-7)) / (form.num_ratios - 1) / 2
    )  # bfloat16 widens the range
    assert (wrong <= half_a_ratio + 2e-5).all()


@BOTH
@given(data=st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_first_moment_moves_by_a_part_of_the_largest_step_of_its_block(
    form: MomentFormat, data: st.DataObject
) -> None:
    steps = data.draw(st.integers(1, 4))
    shape = data.draw(SHAPES)
    gradients = data.draw(arrays.arrays(np.float32, (steps, *shape), elements=st.floats(-1e4, 1e4, width=32)))
    moment1, moment2 = moments_of(gradients)
    back1, back2 = round_trip(moment1, moment2, form)
    assert back1.dtype == np.float32 and back1.shape == moment1.shape and np.isfinite(back1).all()
    assert (back1[moment1 == 0] == 0).all()
    assert (np.sign(back1) * np.sign(moment1) >= 0).all()
    roots = np.sqrt(in_blocks(back2, form))
    updates = np.divide(in_blocks(moment1, form), roots, out=np.zeros_like(roots), where=roots > 1e-18)
    backs = np.divide(in_blocks(back1, form), roots, out=np.zeros_like(roots), where=roots > 1e-18)
    largest = np.abs(updates).max(axis=1, initial=0, keepdims=True)
    part = 0.5 / 127 if form.bits == 8 else 0.16  # half of the widest gap between levels, in units of the largest
    assert (np.abs(updates - backs) <= largest * (part + 0.01)).all()


@BOTH
@given(
    moment1=arrays.arrays(np.float32, (3, 70), elements=st.floats(-LARGEST, LARGEST, width=32)),
    moment2=arrays.arrays(np.float32, (3, 70), elements=st.floats(0, LARGEST, width=32)),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_nothing_overflows_whatever_the_values(form: MomentFormat, moment1: np.ndarray, moment2: np.ndarray) -> None:
    with np.errstate(invalid="raise", divide="raise"):
        back1, back2 = round_trip(moment1, moment2, form)
    assert np.isfinite(back1).all() and np.isfinite(back2).all()
    assert (back1[(moment1 == 0) | (moment2 == 0)] == 0).all()


@BOTH
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(form: MomentFormat, value: float) -> None:
    good, bad = np.ones([2, 100], np.float32), np.ones([2, 100], np.float32)
    bad[1, 99] = value
    with pytest.raises(NotEncodableError, match="second moment is not finite"):
        encode_second(bad, form)
    with pytest.raises(NotEncodableError, match="first moment is not finite"):
        encode_first(bad, encode_second(good, form), form)
    with pytest.raises(NotEncodableError, match="below zero"):
        encode_second(-good, form)


@BOTH
@pytest.mark.parametrize("size", [1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1001])
def test_parts_that_are_worked_on_at_once_change_nothing(
    form: MomentFormat, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(size)
    moment1, moment2 = moments_of(rng.normal(size=(5, size)))
    whole = round_trip(moment1, moment2, form)
    monkeypatch.setattr(quantized_state, "_CHUNK_VALUES", 128)
    for one, other in zip(whole, round_trip(moment1, moment2, form), strict=True):
        np.testing.assert_array_equal(one, other)


def test_how_close_real_moments_come() -> None:
    """Gradients of which some are a thousand times as large as others, some rare."""
    rng = np.random.default_rng(7)
    sizes = np.exp(rng.normal(size=(64, 1)) * 2) * np.exp(rng.normal(size=(1, 96)))
    gradients = rng.normal(size=(40, 64, 96)) * sizes * (rng.random((40, 64, 96)) < 0.3)
    moment1, moment2 = moments_of(gradients)
    errors = {}
    for form in (O1, O2):
        back1, back2 = round_trip(moment1, moment2, form)
        update, back = (m / (np.sqrt(v) + 1e-8) for m, v in ((moment1, moment2), (back1, back2)))
        errors[form.level] = float(np.linalg.norm(back - update) / np.linalg.norm(update))
    assert errors["O1"] < 0.012 and errors["O2"] < 0.15
    assert errors["O1"] > 0.001  # they are codes after all


def test_sizes_in_bytes() -> None:
    assert [(form.code_bytes(1001), form.num_blocks(1001)) for form in (O1, O2)] == [(1001, 8), (501, 16)]

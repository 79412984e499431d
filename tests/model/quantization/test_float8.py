"""8-bit floats against all values that the formats have, and the rotation before them."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from erniekit.model.quantization.float8 import FP8_MAX, amax, encode, hadamard_rotate
from erniekit.model.quantization.hadamard import hadamard

SHAPES = {"e4m3": (3, -6), "e5m2": (2, -14)}  # bits of fraction, least exponent


def all_values(form: str) -> np.ndarray:
    """Every finite value of the format that is not negative, with even codes at even places."""
    fraction, least = SHAPES[form]
    steps = 1 << fraction
    values = [code * 2.0 ** (least - fraction) for code in range(steps)]  # subnormal
    exponent = least
    while values[-1] < FP8_MAX[form]:
        values += [(steps + code) * 2.0 ** (exponent - fraction) for code in range(steps)]
        exponent += 1
    return np.array([value for value in values if value <= FP8_MAX[form]])


def nearest(x: np.ndarray, form: str) -> np.ndarray:
    """By search among all values; of two that are as near the one with the even code."""
    values = all_values(form)
    magnitude = np.minimum(np.abs(x.astype(np.float64)), FP8_MAX[form])
    above = np.searchsorted(values, magnitude).clip(1, len(values) - 1)
    below = above - 1
    high, low = values[above] - magnitude, magnitude - values[below]
    up = (high < low) | ((high == low) & (above % 2 == 0))
    return np.copysign(np.where(up, values[above], values[below]), x).astype(np.float32)


def samples(form: str) -> np.ndarray:
    """All values, what lies halfway and just beside, and random ones of all sizes."""
    values = all_values(form).astype(np.float32)
    halfway = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    rng = np.random.default_rng(0)
    random = rng.standard_normal(20000) * np.exp(rng.uniform(-14, 12, 20000))
    beside = [np.nextafter(halfway, np.float32(sign * np.inf)) for sign in (-1, 1)]
    one_sign = np.concatenate([values, halfway, *beside, np.abs(random).astype(np.float32), [1e6, 1e30]])
    return np.concatenate([one_sign, -one_sign]).astype(np.float32)


def test_the_table_is_that_of_the_formats() -> None:
    assert [len(all_values(form)) for form in SHAPES] == [127, 124]  # codes with no sign, finite ones
    assert all_values("e4m3")[[1, -1]].tolist() == [2**-9, 448] and all_values("e5m2")[[1, -1]].tolist() == [
        2**-16,
        57344,
    ]


@pytest.mark.parametrize("form", SHAPES)
def test_rounding_is_exact_to_the_bit(form: str) -> None:
    x = samples(form)
    found = encode(paddle.to_tensor(x), form, paddle.to_tensor(FP8_MAX[form])).decoded().numpy()
    np.testing.assert_array_equal(found.view(np.uint32), nearest(x, form).view(np.uint32))


@pytest.mark.parametrize("form", SHAPES)
def test_the_largest_value_meets_the_largest_code(form: str) -> None:
    x = paddle.to_tensor(np.float32([0.3, -0.07, 0.001]))
    found = encode(x, form, amax(x))
    assert float(found.codes.astype("float32")[0]) == FP8_MAX[form]
    np.testing.assert_allclose(found.decoded().numpy(), x.numpy(), rtol=2.0 ** -(1 + SHAPES[form][0]))
    beyond = encode(x, form, amax(x) / 2).decoded().numpy()
    np.testing.assert_allclose(beyond[0], 0.15, rtol=1e-6)
    zeros = encode(paddle.zeros([3]), form, amax(paddle.zeros([3])))
    assert not zeros.decoded().numpy().any() and float(zeros.scale) == 1.0
    assert float(amax(paddle.zeros([0, 4]))) == 0.0


@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("largest", [2.0, np.nan])
def test_what_is_not_a_number_stays_so(form: str, largest: float) -> None:
    """With a scale of its own nothing else is a number either; a scale from elsewhere leaves the rest as it is."""
    x = paddle.to_tensor(np.float32([1.0, np.nan, -2.0, np.inf, -np.inf]))
    found = encode(x, form, paddle.to_tensor(largest)).decoded().numpy()
    np.testing.assert_array_equal(found, np.float32([1, np.nan, -2, 2, -2]) * (largest / 2))
    assert np.isnan(encode(x, form, amax(x)).decoded().numpy()).all()
    infinite = x[3:]
    assert np.isinf(encode(infinite, form, amax(infinite)).decoded().numpy()).all()


@pytest.mark.parametrize("form", SHAPES)
def test_scales_of_tiny_values_do_not_vanish(form: str) -> None:
    x = np.float32([1e-38, 3e-38, 0.0])
    found = encode(paddle.to_tensor(x), form, amax(paddle.to_tensor(x))).decoded().numpy()
    np.testing.assert_allclose(found, x, rtol=2**-3)
    for least in (1e-9, 1e-20, 1e-45):  # Paddle's == takes the first for 0
        x = np.float32([least, 0.0])
        found = encode(paddle.to_tensor(x), form, amax(paddle.to_tensor(x))).decoded().numpy()
        np.testing.assert_allclose(found, x, rtol=1e-6, atol=1e-40)


@pytest.mark.parametrize("size", [2, 16, 32, 128])
def test_the_rotation_is_orthogonal_and_undone(size: int) -> None:
    matrix = hadamard(size)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-6)
    np.testing.assert_array_equal(matrix, matrix.T)
    x = paddle.to_tensor(np.random.default_rng(0).standard_normal((3, 5, 2 * size)).astype(np.float32))
    rotated = hadamard_rotate(x, size)
    np.testing.assert_allclose(hadamard_rotate(rotated, size).numpy(), x.numpy(), atol=1e-5)
    np.testing.assert_allclose(rotated.numpy()[..., :size], x.numpy()[..., :size] @ matrix, atol=1e-5)
    assert hadamard_rotate(x, 0) is x


def test_the_rotation_spreads_outliers() -> None:
    x = paddle.to_tensor(np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32))
    x[:, 5] = 1000.0

    def error(block: int) -> float:
        rotated = hadamard_rotate(x, block)
        decoded = hadamard_rotate(encode(rotated, "e5m2", amax(rotated)).decoded(), block)
        return float((decoded - x)[:, 5].abs().max())

    assert float(hadamard_rotate(x, 64).abs().max()) < 200 < float(x.abs().max())
    assert error(64) < 1000 * 2**-3

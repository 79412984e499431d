"""The single-node layers: values against plain formulas, gradients against finite differences in double precision."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from erniekit.model.activation import swiglu
from erniekit.model.norm import rms_norm
from erniekit.model.rotary import RotaryTables, rotary_tables, rotate

RNG = np.random.default_rng(0)
POSITIONS = paddle.to_tensor(np.array([[0, 1, 2, 0, 1]]))


def doubles(*shape):
    return RNG.standard_normal(shape)


def turned_in_complex_numbers(x):
    """Each pair of channels as one complex number, multiplied by exp(i angle)."""
    angles = np.array([0, 1, 2, 0, 1])[:, None] * 10000.0 ** (-np.arange(0, 6, 2) / 6)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def rotate_in_double_precision(x):
    tables = rotary_tables(POSITIONS, heads=2, head_dim=6, theta=10000.0)
    return rotate(x, RotaryTables(*(table.astype("float64") for table in tables)))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


CASES = {
    "rms_norm": (
        lambda x, w: rms_norm(x, w, 1e-3),
        lambda x, w: w * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3),
        (doubles(2, 3, 6), doubles(6)),
    ),
    "swiglu": (swiglu, lambda g, u: g * sigmoid(g) * u, (doubles(4, 5) * 3, doubles(4, 5))),
    "rotate": (rotate_in_double_precision, turned_in_complex_numbers, (doubles(5, 2, 6),)),
}


@pytest.mark.parametrize(("function", "formula", "inputs"), CASES.values(), ids=CASES.keys())
def test_values_equal_the_formula(function, formula, inputs):
    actual = function(*map(paddle.to_tensor, inputs)).numpy()
    np.testing.assert_allclose(actual, formula(*inputs), atol=1e-7)


@pytest.mark.parametrize(("function", "formula", "inputs"), CASES.values(), ids=CASES.keys())
def test_gradients_equal_finite_differences(function, formula, inputs):
    tensors = [paddle.to_tensor(values, stop_gradient=False) for values in inputs]
    out = function(*tensors)
    weight = doubles(*out.shape)
    (out * paddle.to_tensor(weight)).sum().backward()
    for number, tensor in enumerate(tensors):
        for index in np.ndindex(*inputs[number].shape):
            ends = []
            for step in (1e-6, -1e-6):
                moved = [values.copy() for values in inputs]
                moved[number][index] += step
                ends.append((formula(*moved) * weight).sum())
            assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(float(tensor.grad[index]), abs=1e-6)


def test_a_frozen_norm_weight_gets_no_gradient():
    x, weight = paddle.ones([2, 4]), paddle.ones([4])
    x.stop_gradient = False
    rms_norm(x, weight, 1e-5).sum().backward()
    assert weight.grad is None and x.grad is not None


def test_angles_are_float32_products_as_in_the_published_models():
    tables = rotary_tables(paddle.to_tensor([[100_003]]), heads=3, head_dim=8, theta=500000.0)
    frequencies = (500000.0 ** -(np.arange(0, 8, 2) / 8)).astype(np.float32)
    angles = np.repeat(np.float32(100_003) * frequencies, 2)
    for head in range(3):
        np.testing.assert_allclose(tables.cos.numpy()[0, head], np.cos(angles, dtype=np.float32), atol=2e-7)
        np.testing.assert_allclose(tables.sin.numpy()[0, head], np.sin(angles, dtype=np.float32), atol=2e-7)

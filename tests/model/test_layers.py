"""The single-node layers: values against plain formulas, gradients against finite differences in double precision."""

from __future__ import annotations

from functools import partial

import numpy as np
import paddle
import pytest

from erniekit.model import native
from erniekit.model.architectures.rope_scaling import Frequencies
from erniekit.model.mlp import swiglu
from erniekit.model.norm import rms_norm
from erniekit.model.rope import RotaryTables, apply_rotary, rms_norm_rotary, rotary_tables

RNG = np.random.default_rng(0)
POSITIONS = paddle.to_tensor(np.array([[0, 1, 2, 0, 1]]))


def doubles(*shape):
    return RNG.standard_normal(shape)


def plain_frequencies(theta, head_dim):
    return Frequencies(tuple(theta ** -(np.arange(0, head_dim, 2) / head_dim)), 1.0)


def turned_in_complex_numbers(x, interleaved=True):
    """Each pair of channels as one complex number, multiplied by exp(i angle)."""
    angles = np.array([0, 1, 2, 0, 1])[:, None] * 10000.0 ** (-np.arange(0, 6, 2) / 6)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :3], x[..., 3:])
    turned = (first + 1j * second) * np.exp(1j * angles)[:, None]
    if interleaved:
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape)
    return np.concatenate([turned.real, turned.imag], -1)


def rotate_in_double_precision(x, interleaved=True):
    tables = rotary_tables(POSITIONS, 2, plain_frequencies(10000.0, 6), interleaved=interleaved)
    return apply_rotary(x, RotaryTables(tables.cos.astype("float64"), tables.sin.astype("float64"), interleaved))


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
    "rotate halves": (
        partial(rotate_in_double_precision, interleaved=False),
        partial(turned_in_complex_numbers, interleaved=False),
        (doubles(5, 2, 6),),
    ),
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


def by_paddle_and_by_kernels(monkeypatch, compute):
    """Return the arrays of both ways."""
    ours = compute()
    monkeypatch.setattr(native, "kernel", lambda *_: None)
    return zip(compute(), ours, strict=True)


@pytest.mark.parametrize("shape", [(1, 1, 16), (2, 40, 48), (70, 3, 10)])
def test_the_norm_of_kernels_is_that_of_paddle(shape, monkeypatch, native_kernels):
    values, weights, grads = (paddle.to_tensor(doubles(*s), "float32") for s in (shape, shape[-1:], shape))

    def compute():
        x, w = values.clone().detach(), weights.clone().detach()
        x.stop_gradient = w.stop_gradient = False
        y = rms_norm(x, w, 1e-5)
        y.backward(grads)
        return y.numpy(), x.grad.numpy(), w.grad.numpy()

    for expected, found in by_paddle_and_by_kernels(monkeypatch, compute):
        np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("interleaved", [True, False])
def test_the_rotation_of_kernels_is_that_of_paddle(interleaved, monkeypatch, native_kernels):
    values, grads = (paddle.to_tensor(doubles(5, 3, 20), "float32") for _ in range(2))

    def compute():
        tables = rotary_tables(POSITIONS, 3, Frequencies((1.0, 0.3, *[0.0] * 8), 1.5), interleaved=interleaved)
        x = values.clone().detach()
        x.stop_gradient = False
        y = apply_rotary(x, tables)
        y.backward(grads)
        return y.numpy(), x.grad.numpy()

    for expected, found in by_paddle_and_by_kernels(monkeypatch, compute):
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_norm_and_rotation_of_kernels_are_those_of_paddle(interleaved, frozen, monkeypatch, native_kernels):
    values, grads = (paddle.to_tensor(doubles(5, 3, 20), "float32") for _ in range(2))
    weights = paddle.to_tensor(doubles(20), "float32")

    def compute():
        tables = rotary_tables(POSITIONS, 3, plain_frequencies(10000.0, 20), interleaved=interleaved)
        x, w = values.clone().detach(), weights.clone().detach()
        x.stop_gradient, w.stop_gradient = False, frozen
        y = rms_norm_rotary(x, w, 1e-3, tables)
        y.backward(grads)
        return [y.numpy(), x.grad.numpy()] + ([] if frozen else [w.grad.numpy()])

    for expected, found in by_paddle_and_by_kernels(monkeypatch, compute):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_tables_of_kernels_serve_paddle_too():
    """Other precisions and strided tensors go to Paddle's operators, with the tables of the batch."""
    tables = rotary_tables(POSITIONS, 3, plain_frequencies(10000.0, 6), interleaved=True)
    x = doubles(5, 3, 6)
    wide = RotaryTables(tables.cos.astype("float64"), tables.sin.astype("float64"), True)
    found = apply_rotary(paddle.to_tensor(x), wide).numpy()
    np.testing.assert_allclose(found, turned_in_complex_numbers(x), atol=1e-6)
    strided = paddle.to_tensor(x.transpose(1, 0, 2).copy(), "float32").transpose([1, 0, 2])
    np.testing.assert_allclose(apply_rotary(strided, tables).numpy(), found, atol=1e-6)


def test_a_frozen_norm_weight_gets_no_gradient():
    x, weight = paddle.ones([2, 4]), paddle.ones([4])
    x.stop_gradient = False
    rms_norm(x, weight, 1e-5).sum().backward()
    assert weight.grad is None and x.grad is not None


def test_angles_are_float32_products_as_in_the_published_models():
    tables = rotary_tables(paddle.to_tensor([[100_003]]), 3, plain_frequencies(500000.0, 8), interleaved=True)
    frequencies = (500000.0 ** -(np.arange(0, 8, 2) / 8)).astype(np.float32)
    angles = np.repeat(np.float32(100_003) * frequencies, 2)
    for head in range(tables.cos.shape[1]):
        np.testing.assert_allclose(tables.cos.numpy()[0, head], np.cos(angles, dtype=np.float32), atol=2e-7)
        np.testing.assert_allclose(tables.sin.numpy()[0, head], np.sin(angles, dtype=np.float32), atol=2e-7)

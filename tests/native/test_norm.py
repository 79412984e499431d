"""RMSNorm's kernels against the formula in float64, with odd sizes and guards behind the outputs."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from .arrays import Output, kernel

pytestmark = pytest.mark.usefixtures("native_path")

SHAPES = [(1, 1), (3, 7), (5, 17), (33, 64), (2, 255), (130, 96)]


def inputs(rows, size):
    rng = np.random.default_rng(size)
    arrays = rng.standard_normal((rows, size)), rng.standard_normal(size), rng.standard_normal((rows, size))
    return [array.astype(np.float32) for array in arrays]


def backward(x, weight, inverse, grad, blocks, frozen=False):
    grad_x, partial = Output(*x.shape), Output(blocks, x.shape[1])
    kernel("rms_norm_backward", "lllpppppp")(
        *x.shape, blocks, *(array.ctypes.data for array in (x, weight, inverse, grad)),
        grad_x.pointer, None if frozen else partial.pointer,
    )  # fmt: skip
    return grad_x.read(), partial.read()[0]


@pytest.mark.parametrize(("rows", "size"), SHAPES)
@pytest.mark.parametrize("blocks", [1, 3])
def test_values_and_gradients_are_those_of_the_formula(rows, size, blocks):
    x, weight, grad = inputs(rows, size)
    y, inverse = Output(rows, size), Output(rows)
    pointers = x.ctypes.data, weight.ctypes.data, 1e-3, y.pointer, inverse.pointer
    kernel("rms_norm", "llppfpp")(rows, size, *pointers)
    wide, g, w = x.astype(np.float64), grad.astype(np.float64), weight.astype(np.float64)
    r = 1 / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(inverse.read(), r[:, 0], rtol=1e-6)
    np.testing.assert_allclose(y.read(), wide * r * w, rtol=1e-6, atol=1e-12)
    grad_x, grad_weight = backward(x, weight, inverse.read(), grad, blocks)
    expected = r * w * g - wide * r**3 * (w * g * wide).mean(-1, keepdims=True)
    np.testing.assert_allclose(grad_x, expected, atol=1e-6 * np.abs(r * w * g).max())
    expected = (r * g * wide).sum(0)
    np.testing.assert_allclose(grad_weight, expected, atol=2e-6 * max(1, np.abs(expected).max()))


def test_a_frozen_weight_changes_nothing_else():
    x, weight, grad = inputs(6, 40)
    inverse = np.ones(6, np.float32)
    with_weight, _ = backward(x, weight, inverse, grad, 2)
    without, partial = backward(x, weight, inverse, grad, 2, frozen=True)
    assert np.array_equal(with_weight, without) and not partial.any()


def test_gradients_do_not_depend_on_the_number_of_threads():
    x, weight, grad = inputs(301, 72)
    inverse = np.random.default_rng(0).random(301).astype(np.float32)
    kernel("rms_norm_backward", "lllpppppp")  # loads OpenMP
    openmp = ctypes.CDLL(None)
    threads, results = openmp.omp_get_max_threads(), []
    try:
        for count in (1, 2, 3):
            openmp.omp_set_num_threads(count)
            results.append(backward(x, weight, inverse, grad, 9))
    finally:
        openmp.omp_set_num_threads(threads)
    for grad_x, grad_weight in results[1:]:
        assert np.array_equal(grad_x, results[0][0]) and np.array_equal(grad_weight, results[0][1])

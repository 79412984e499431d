"""The rotary kernel against complex numbers in float64."""

from __future__ import annotations

import numpy as np
import pytest

from .arrays import Output, kernel

pytestmark = pytest.mark.usefixtures("native_path")


def turn(x, cos, sin, interleaved, direction):
    y = Output(*x.shape)
    arrays = (array.ctypes.data for array in (x, cos, sin))
    kernel("rotary", "lllifpppp")(*x.shape, interleaved, direction, *arrays, y.pointer)
    return y.read()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 1, 2), (5, 3, 10), (4, 2, 64), (3, 1, 34)])
def test_pairs_turn_and_turn_back(tokens, heads, size, interleaved):
    rng = np.random.default_rng(size)
    x, angles = rng.standard_normal((tokens, heads, size)), rng.uniform(-9, 9, (tokens, size // 2))
    per_channel = np.repeat(angles, 2, axis=1) if interleaved else np.tile(angles, 2)
    x, cos, sin = (np.ascontiguousarray(array, np.float32) for array in (x, np.cos(per_channel), np.sin(per_channel)))
    y = turn(x, cos, sin, interleaved, 1.0)
    first, second = (
        (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(size // 2), slice(size // 2, None))
    )
    expected = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(y[..., first] + 1j * y[..., second], expected, atol=1e-6)
    np.testing.assert_allclose(turn(y, cos, sin, interleaved, -1.0), x, atol=2e-6)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 1, 2), (5, 3, 10), (40, 2, 64), (3, 1, 34)])
@pytest.mark.parametrize("blocks", [1, 3])
def test_norm_and_rotation_together_are_one_after_the_other(tokens, heads, size, interleaved, blocks):
    rng = np.random.default_rng(size)
    x, grad = (rng.standard_normal((tokens, heads, size)).astype(np.float32) for _ in range(2))
    weight, angles = rng.standard_normal(size).astype(np.float32), rng.uniform(-9, 9, (tokens, size // 2))
    per_channel = np.repeat(angles, 2, axis=1) if interleaved else np.tile(angles, 2)
    cos, sin = (np.ascontiguousarray(array, np.float32) for array in (np.cos(per_channel), np.sin(per_channel)))
    x_weight, cos_sin = (x.ctypes.data, weight.ctypes.data), (cos.ctypes.data, sin.ctypes.data)

    y, inverse = Output(*x.shape), Output(tokens, heads)
    outputs = y.pointer, inverse.pointer
    kernel("norm_rotary", "lllippfpppp")(*x.shape, interleaved, *x_weight, 1e-3, *cos_sin, *outputs)
    normed, expected_inverse = Output(*x.shape), Output(tokens, heads)
    outputs = normed.pointer, expected_inverse.pointer
    kernel("rms_norm", "llppfpp")(tokens * heads, size, *x_weight, 1e-3, *outputs)
    assert np.array_equal(inverse.read(), expected_inverse.read())
    np.testing.assert_allclose(y.read(), turn(normed.read(), cos, sin, interleaved, 1.0), atol=1e-6)

    grad_x, partial = Output(*x.shape), Output(blocks, size)
    kernel("norm_rotary_backward", "llllipppppppp")(
        *x.shape, blocks, interleaved, *x_weight, inverse.pointer, *cos_sin,
        grad.ctypes.data, grad_x.pointer, partial.pointer,
    )  # fmt: skip
    back = turn(grad, cos, sin, interleaved, -1.0)
    expected_x, expected_partial = Output(*x.shape), Output(1, size)
    kernel("rms_norm_backward", "lllpppppp")(
        tokens * heads, size, 1, *x_weight, inverse.pointer, back.ctypes.data,
        expected_x.pointer, expected_partial.pointer,
    )  # fmt: skip
    np.testing.assert_allclose(grad_x.read(), expected_x.read(), atol=1e-5)
    np.testing.assert_allclose(partial.read()[0], expected_partial.read()[0], atol=2e-5)

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

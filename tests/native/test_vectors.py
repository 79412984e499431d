"""Sums of squares, and products with a number, of vectors within one block and beyond."""

from __future__ import annotations

import numpy as np
import pytest

from .arrays import Output, kernel

pytestmark = pytest.mark.usefixtures("native_path")

SIZES = [0, 1, 17, 255, 65536, 2 * 65536 + 77]


@pytest.mark.parametrize("size", SIZES)
def test_squares_are_summed(size):
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    parts, total = Output(-(-size // 65536), dtype=np.float64), Output(1)
    kernel("squared_norm", "lppp")(size, x.ctypes.data, parts.pointer, total.pointer)
    parts.read()
    assert total.read()[0] == pytest.approx((x.astype(np.float64) ** 2).sum(), rel=2e-6)


@pytest.mark.parametrize("size", SIZES)
def test_a_vector_is_scaled(size):
    values = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    x = Output(size, values=values)
    kernel("scale", "lfp")(size, 0.3, x.pointer)
    np.testing.assert_allclose(x.read(), values * np.float32(0.3), rtol=1e-6)

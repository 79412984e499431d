"""The kernels between tokens and their rows against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from .arrays import Output, kernel

pytestmark = pytest.mark.usefixtures("native_path")

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(("tokens", "each", "size"), [(1, 1, 1), (5, 3, 7), (4, 2, 40), (3, 6, 255)])
@pytest.mark.parametrize("weighted", [True, False])
def test_rows_are_spread_summed_and_multiplied(tokens, each, size, weighted):
    row_of = RNG.permutation(tokens * each).reshape(tokens, each)
    x, rows = (RNG.standard_normal((count, size)).astype(np.float32) for count in (tokens, tokens * each))
    weights = RNG.random((tokens, each)).astype(np.float32)
    factors, pointer = (weights, weights.ctypes.data) if weighted else (np.ones_like(weights), None)
    shape = tokens, each, size, row_of.ctypes.data

    spread = Output(tokens * each, size)
    kernel("spread_rows", "lllpppp")(*shape, pointer, x.ctypes.data, spread.pointer)
    expected = np.empty_like(rows)
    expected[row_of.reshape(-1)] = (x[:, None] * factors[..., None]).reshape(-1, size)
    np.testing.assert_allclose(spread.read(), expected, rtol=1e-6)

    summed = Output(tokens, size, values=np.nan)  # what was there before does not count
    kernel("sum_rows", "lllpppp")(*shape, pointer, rows.ctypes.data, summed.pointer)
    np.testing.assert_allclose(summed.read(), (rows[row_of] * factors[..., None]).sum(1), atol=1e-5)

    products = Output(tokens, each)
    kernel("row_products", "lllpppp")(*shape, x.ctypes.data, rows.ctypes.data, products.pointer)
    np.testing.assert_allclose(products.read(), (rows[row_of] * x[:, None]).sum(-1), atol=1e-4)

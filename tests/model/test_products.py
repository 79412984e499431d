"""A product is added to a matrix as Paddle's operators would, by whatever adds it."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from erniekit.model import native
from erniekit.model.products import add_product
from erniekit.native import mkl

RNG = np.random.default_rng(0)


def added(total, a, b):
    result = paddle.to_tensor(total)
    add_product(result, a, b)
    return result.numpy()


@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 17, 5), (40, 3, 255)])
def test_a_product_is_added(shape, monkeypatch):
    inner, rows, columns = shape
    total, a, b = (RNG.standard_normal(size) for size in ((rows, columns), (inner, rows), (inner, columns)))
    tensors = [paddle.to_tensor(array, "float32") for array in (a, b)]
    found = added(total.astype(np.float32), *tensors)
    np.testing.assert_allclose(found, total + a.T @ b, atol=1e-5)
    monkeypatch.setattr(native, "computes", lambda *_: False)
    np.testing.assert_allclose(added(total.astype(np.float32), *tensors), found, atol=1e-5)


def test_mkl_adds_and_writes_nothing_else(monkeypatch, native_kernels):
    if mkl.sgemm() is None:
        pytest.skip("Paddle has no MKL")
    monkeypatch.setattr(paddle, "matmul", None)
    memory = paddle.full([6, 3], 2.0)
    add_product(memory[2:4], paddle.ones([5, 2]), paddle.ones([5, 3]))
    assert memory.numpy().tolist() == [[2.0] * 3] * 2 + [[7.0] * 3] * 2 + [[2.0] * 3] * 2


def test_matrices_that_are_not_contiguous_are_added_too():
    a, b = paddle.to_tensor(RNG.standard_normal((2, 6)), "float32").t(), paddle.ones([6, 4])
    np.testing.assert_allclose(added(np.zeros((2, 4), np.float32), a, b), a.numpy().T @ b.numpy(), atol=1e-5)

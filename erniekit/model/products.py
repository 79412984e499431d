"""Products in place: one that is added to a matrix, and that of a tensor with a number."""

from __future__ import annotations

import paddle

from erniekit.model import native
from erniekit.native import mkl


def add_product(total: paddle.Tensor, a: paddle.Tensor, b: paddle.Tensor) -> None:
    """Compute total += a^T b in place, without a gradient, for a [T, M], b [T, N] and total [M, N].

    Paddle's operators write the product to memory and read it again. The sum has the same bits.
    """
    if native.computes(total, a, b) and mkl.sgemm() is not None and a.shape[0] > 0:
        (rows, columns), inner = total.shape, a.shape[0]
        assert a.shape == [inner, rows] and b.shape == [inner, columns]
        mkl.add_product(rows, columns, inner, a.data_ptr(), b.data_ptr(), total.data_ptr())
    else:
        total.add_(paddle.matmul(a, b, transpose_x=True))


def scale_in_place(x: paddle.Tensor, factor: float | paddle.Tensor) -> None:
    """Multiply a tensor in place, without a gradient, with a number or a 0-d tensor; Paddle's operator uses one thread
    on a CPU."""
    if (kernel := native.kernel("scale", "lfp", x)) is not None:
        kernel(native.size(x), float(factor), x.data_ptr())
    else:
        x.scale_(factor)

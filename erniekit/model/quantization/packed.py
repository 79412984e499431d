"""Frozen quantized weights of linear layers; each forward and backward pass makes a temporary dense copy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import paddle
from paddle import nn
from paddle.autograd import PyLayer

from erniekit.model import bf16
from erniekit.model.architectures.architecture import Architecture
from erniekit.model.autograd import apply, autocast_operand
from erniekit.model.linear import Linear
from erniekit.model.quantization.codes import byte_levels, quantize, slice_quantized
from erniekit.model.quantization.formats import Format
from erniekit.model.quantization.settings import WeightOnly
from erniekit.model.tensor_parallel import TensorParallel


class PackedWeight(nn.Layer):
    """Replaces `Linear.weight`. Its tensors are buffers, so that no optimizer and no gradient reduction includes them.

    Codes and scales are [out, ...] as in files (see `codes.QuantizedTensor`); this rank has its shard of them.
    """

    def __init__(self, form: Format, dtype: paddle.dtype) -> None:
        """`dtype`: the default dtype of dense copies."""
        super().__init__()
        self.form, self._dtype = form, dtype

    @paddle.no_grad()
    def fill(self, name: str, values: np.ndarray, tp: TensorParallel, axis: int | None = None) -> None:
        """Take a whole weight [out, in]; scales are those of the whole, of which this rank may have a slice.

        Args:
            axis: of the decoder's weight [in, out], that the ranks divide; None: each has all of it.

        Raises:
            ModelFileError: the values cannot be quantized.
        """
        packed = quantize(values, self.form, name)
        if tp.size > 1 and axis is not None:
            axis = 1 - axis  # of the file
            width = tp.local_size(values.shape[axis])
            assert axis == 0 or self.form.divides(values.shape[1], tp.size)  # the runner has checked it
            own = range(tp.rank * width, (tp.rank + 1) * width)
            packed = slice_quantized(packed, self.form, axis, own, values.shape[1])
        for key, part in packed._asdict().items():
            self.register_buffer(key, paddle.to_tensor(np.ascontiguousarray(part)), persistable=False)

    def forward(self, x: paddle.Tensor, linear: Linear) -> paddle.Tensor:
        """Compute x W, [..., in] -> [..., out]."""
        return apply(_Product, autocast_operand(x), self)

    def dense(self, dtype: paddle.dtype | None = None) -> paddle.Tensor:
        """Return a new dense copy [out, in]."""
        dtype = dtype or self._dtype
        with paddle.no_grad():
            outputs, groups = self.scales.shape
            if self.form.levels:
                levels = _levels(self.form, str(dtype).removeprefix("paddle."), paddle.get_device())
                units = paddle.gather(levels, self.codes.flatten().astype("int32"))
            else:
                units = self.codes.astype(dtype)
            grouped = units.reshape([outputs, groups, -1]).multiply_(self.scales.unsqueeze(-1).astype(dtype))
            return grouped.reshape([outputs, -1])

    @property
    def values(self) -> int:
        """The number of weights in the codes."""
        return self.codes.size * 8 // self.form.bits

    @property
    def nbytes(self) -> int:
        return sum(buffer.size * buffer.element_size() for buffer in (self.codes, self.scales))


@cache
def _levels(form: Format, dtype: str, device: str) -> paddle.Tensor:
    return paddle.to_tensor(byte_levels(form), place=device).astype(dtype)


class _Product(PyLayer):
    """y = x W, dx = dy W^T. It saves nothing for backward: a frozen weight has no gradient that needs x."""

    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        ctx.weight, ctx.products = weight, bf16.enabled()
        return bf16.linear_matmul(x, weight.dense(x.dtype), transpose_y=True)

    @staticmethod
    @bf16.as_in_forward
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return bf16.linear_matmul(grad, ctx.weight.dense(grad.dtype))


def pack_linears(linears: Mapping[str, Linear], settings: WeightOnly, architecture: Architecture) -> None:
    """Put packed weights, still empty, in the place of the dense ones of linear layers, by path.

    The dense weights may be uninitialised.
    """
    for path, linear in linears.items():
        linear.product, linear.weight = PackedWeight(settings.form(path, architecture), linear.weight.dtype), None


def packed_weight(linear: Linear) -> PackedWeight | None:
    """Return the packed weight of a linear layer; None if it has none."""
    return linear.product if isinstance(linear.product, PackedWeight) else None

"""The linear layer of every projection: x W + b, with room for a low-rank adapter beside the weight."""

from __future__ import annotations

from typing import Literal, Protocol

import paddle
import paddle.nn.functional as F
from paddle import nn

from erniekit.model.tensor_slice import WHOLE, TensorSlice

ZEROS = nn.initializer.Constant(0.0)  # weights are always set by the builder; drawing random ones here is wasted


class Adapter(Protocol):
    """What may sit beside the weight of a `Linear`."""

    def __call__(self, x: paddle.Tensor, output: paddle.Tensor, linear: Linear) -> paddle.Tensor: ...


class Linear(nn.Layer):
    """x [..., in] -> x W + b [..., out], W [in, out]. With an adapter, what the adapter makes of that.

    Parameters are named `weight` and `bias`; those of an adapter begin with `adapter.`.

    Args:
        tensor: the ranks that divide it.
        cut: which axis they divide. With "outputs" x must have entered the block and the output is this rank's slice;
            with "inputs" x is this rank's slice and the output has left the block.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = False,
        *,
        tensor: TensorSlice = WHOLE,
        cut: Literal["inputs", "outputs"] | None = None,
    ) -> None:
        super().__init__()
        self.tensor = tensor
        self.sums = tensor.size > 1 and cut == "inputs"  # over the ranks; the bias is added once, after it
        if cut == "inputs":
            inputs = tensor.part(inputs)
        elif cut == "outputs":
            outputs = tensor.part(outputs)
        self.weight = self.create_parameter([inputs, outputs], default_initializer=ZEROS)
        self.bias = self.create_parameter([outputs], default_initializer=ZEROS, is_bias=True) if bias else None
        self.adapter: nn.Layer | None = None

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        output = F.linear(x, self.weight, None if self.sums else self.bias)
        if self.adapter is not None:
            output = self.adapter(x, output, self)
        if self.sums:
            output = self.tensor.leave(output)
            if self.bias is not None:
                output = output + self.bias
        return output

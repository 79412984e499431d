"""The linear layer of every projection: x W + b, with room for a low-rank adapter beside the weight."""

from __future__ import annotations

from typing import Protocol

import paddle
import paddle.nn.functional as F
from paddle import nn

ZEROS = nn.initializer.Constant(0.0)  # weights are always set by the builder; drawing random ones here is wasted


class Adapter(Protocol):
    """What may sit beside the weight of a `Linear`."""

    def __call__(self, x: paddle.Tensor, output: paddle.Tensor, linear: Linear) -> paddle.Tensor: ...


class Linear(nn.Layer):
    """x [..., in] -> x W + b [..., out], W [in, out]. With an adapter, what the adapter makes of that.

    Parameters are named `weight` and `bias`; those of an adapter begin with `adapter.`.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = self.create_parameter([inputs, outputs], default_initializer=ZEROS)
        self.bias = self.create_parameter([outputs], default_initializer=ZEROS, is_bias=True) if bias else None
        self.adapter: nn.Layer | None = None

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        output = F.linear(x, self.weight, self.bias)
        return output if self.adapter is None else self.adapter(x, output, self)

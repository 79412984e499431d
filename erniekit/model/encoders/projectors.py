"""Projectors: what makes the states of an encoder hidden states of a decoder. Names are those of transformers."""

from __future__ import annotations

from dataclasses import replace

import paddle
from paddle import nn

from erniekit.model.cpu_gradients import gelu
from erniekit.model.linear import Linear
from erniekit.model.tensor_parallel import TensorParallel


class VoxtralProjector(nn.Layer):
    """States [A, S, C] -> hidden states [A * S * C / I, H]: so many states in a row are joined to I channels, and two
    linears with a GELU between them make one hidden state of them. The ranks of `tp` divide the channels between."""

    def __init__(self, inputs: int, outputs: int, tp: TensorParallel) -> None:
        super().__init__()
        self.inputs, self.tp = inputs, replace(tp, sequence_parallel=False)
        self.linear_1 = Linear(inputs, outputs, tp=self.tp, shard_along="outputs")
        self.linear_2 = Linear(outputs, outputs, tp=self.tp, shard_along="inputs")

    def forward(self, x_ASC: paddle.Tensor) -> paddle.Tensor:
        joined = self.tp.copy_to_tp(x_ASC.reshape([-1, self.inputs]))
        return self.linear_2(gelu(self.linear_1(joined)))


class LinearProjector(nn.Layer):
    """States [A, S, C] -> hidden states [A * S, H], by one linear, which every rank has whole."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.linear = Linear(inputs, outputs, bias=True)

    def forward(self, x_ASC: paddle.Tensor) -> paddle.Tensor:
        return self.linear(x_ASC.reshape([-1, self.inputs]))

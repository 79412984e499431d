"""The gated feed-forward network of every family (SwiGLU; Shazeer, 2020, arXiv:2002.05202)."""

from __future__ import annotations

from typing import Literal

import paddle
from paddle import nn

from erniekit.model.activation import swiglu
from erniekit.model.configuration import ModelConfig
from erniekit.model.linear import Linear
from erniekit.model.tensor_slice import NO_TENSOR_PARALLEL, TensorParallel


class MLP(nn.Layer):
    """down(silu(gate x) * up x), with `inner_size` channels in between, which the ranks of `tensor` divide."""

    def __init__(self, config: ModelConfig, inner_size: int, tp: TensorParallel = NO_TENSOR_PARALLEL) -> None:
        super().__init__()
        self.tp = tp

        def linear(name: str, inputs: int, outputs: int, shard_along: Literal["inputs", "outputs"]) -> Linear:
            return Linear(inputs, outputs, config.has_bias(name), tp=tp, shard_along=shard_along)

        self.gate_proj = linear("gate_proj", config.hidden_size, inner_size, "outputs")
        self.up_proj = linear("up_proj", config.hidden_size, inner_size, "outputs")
        self.down_proj = linear("down_proj", inner_size, config.hidden_size, "inputs")

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.tp.copy_to_tp(x)
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))

"""The gated feed-forward network of every family (SwiGLU; Shazeer, 2020, arXiv:2002.05202)."""

from __future__ import annotations

import paddle
from paddle import nn

from erniekit.model.activation import swiglu
from erniekit.model.configuration import ModelConfig
from erniekit.model.linear import Linear


class MLP(nn.Layer):
    """down(silu(gate x) * up x), with `inner_size` channels in between."""

    def __init__(self, config: ModelConfig, inner_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, inner_size, config.has_bias("gate_proj"))
        self.up_proj = Linear(config.hidden_size, inner_size, config.has_bias("up_proj"))
        self.down_proj = Linear(inner_size, config.hidden_size, config.has_bias("down_proj"))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))

"""A layer of experts: each token passes through a few of them, chosen by a router, and through the shared ones.

Shapes: T tokens, E experts, K of them for each token, H hidden size.
"""

from __future__ import annotations

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

from erniekit.model.configuration import ModelConfig
from erniekit.model.mlp import MLP
from erniekit.model.moe.balance import ExpertBalance
from erniekit.model.moe.router import Gate, GateStatistics, Router, Routes
from erniekit.model.tensor_slice import WHOLE, TensorSlice


class MoE(nn.Layer):
    """Takes the place of a layer's MLP. Tokens are grouped by expert, so each expert runs once, over its own tokens."""

    def __init__(self, config: ModelConfig, layer: int, balance: ExpertBalance, tensor: TensorSlice = WHOLE) -> None:
        super().__init__()
        inner = config.moe_intermediate_size
        self.gate, self.moe_statics = Gate(config), GateStatistics(config)
        self.experts = nn.LayerList([MLP(config, inner) for _ in range(config.moe_num_experts)])
        shared = config.moe_num_shared_experts
        self.shared_experts = MLP(config, shared * inner, tensor) if shared else None
        self.router = Router(config, layer, self.gate, self.moe_statics, balance)

    def forward(self, x_BSH: paddle.Tensor, is_token_BS: paddle.Tensor | None = None) -> paddle.Tensor:
        """is_token_BS: 1.0 for tokens and 0.0 for padding, which no router loss counts; None: there is no padding."""
        x_TH = x_BSH.reshape([-1, x_BSH.shape[-1]])
        routes, logits_TE = self.router(x_TH)
        if paddle.in_dynamic_mode():
            experts_TK = routes.experts.numpy()
            if self.training:
                is_token_T = None if is_token_BS is None else is_token_BS.reshape([-1])
                routes = self.router.balanced(routes, logits_TE, experts_TK, is_token_T)
            out_TH = self._grouped(x_TH, routes, experts_TK)
        else:
            out_TH = self._all_experts(x_TH, routes)
        if self.shared_experts is not None:
            out_TH = out_TH + self.shared_experts(x_TH)
        return out_TH.reshape(x_BSH.shape)

    def _grouped(self, x_TH: paddle.Tensor, routes: Routes, experts_TK: np.ndarray) -> paddle.Tensor:
        """Sum over a token's experts of weight * expert(token)."""
        tokens, k = experts_TK.shape
        order = np.argsort(experts_TK.reshape(-1), kind="stable")  # routes, those of one expert side by side
        counts = np.bincount(experts_TK.reshape(-1), minlength=len(self.experts))
        active = np.flatnonzero(counts)
        rows = paddle.gather(x_TH, paddle.to_tensor(order // k))
        groups = paddle.split(rows, counts[active].tolist()) if len(active) > 1 else [rows]
        outputs = [self.experts[int(expert)](group) for expert, group in zip(active, groups, strict=True)]
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        outputs_TKH = paddle.gather(paddle.concat(outputs), paddle.to_tensor(back)).reshape([tokens, k, -1])
        return paddle.matmul(routes.weights.unsqueeze(1).astype(x_TH.dtype), outputs_TKH).squeeze(1)

    def _all_experts(self, x_TH: paddle.Tensor, routes: Routes) -> paddle.Tensor:
        """The same sum with every expert over every token: how a saved program computes, whose groups have no size."""
        chosen_TKE = F.one_hot(routes.experts, len(self.experts))
        weights_TE = paddle.matmul(routes.weights.unsqueeze(1), chosen_TKE).squeeze(1).astype(x_TH.dtype)
        outputs = [weights_TE[:, number : number + 1] * expert(x_TH) for number, expert in enumerate(self.experts)]
        return paddle.add_n(outputs)

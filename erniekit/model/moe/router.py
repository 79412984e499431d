"""Which experts each token goes to, and with which weights: ERNIE-4.5's gate.

Shapes: T tokens, E experts, K of them for each token, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

from erniekit.model.configuration import ModelConfig
from erniekit.model.linear import ZEROS
from erniekit.model.moe.balance import ExpertBalance
from erniekit.model.moe.exchange import Replicated
from erniekit.model.moe.router_losses import (
    add_gradient,
    balance_loss,
    no_all_reduce,
    orthogonal_loss,
    token_weights,
    z_loss,
)
from erniekit.model.tensor_slice import NO_TENSOR_PARALLEL, TensorParallel


class Routes(NamedTuple):
    """Experts are int64 [T, K], the likeliest first; weights float32 [T, K]."""

    experts: paddle.Tensor
    weights: paddle.Tensor


class Gate(nn.Layer):
    """A score for each expert: x W^T, always in float32; W [E, H] as Hugging Face stores it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = [config.moe_num_experts, config.hidden_size]
        self.weight = self.create_parameter(shape, default_initializer=ZEROS)

    def forward(
        self, x_TH: paddle.Tensor, compute: Callable[[paddle.Tensor], paddle.Tensor] | None = None
    ) -> paddle.Tensor:
        """The logits [T, E], or what `compute` makes of the weight, which is used in here only (see `Head`)."""
        if compute is not None:
            return compute(self.weight)
        return paddle.matmul(x_TH.astype(self.weight.dtype), self.weight, transpose_y=True)


class GateStatistics(nn.Layer):
    """The correction bias [1, E]: it takes part in the choice of experts only, and no gradient reaches it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = [1, config.moe_num_experts]
        self.e_score_correction_bias = self.create_parameter(shape, default_initializer=ZEROS)
        self.e_score_correction_bias.stop_gradient = True


class Router:
    """The gate with its statistics, both owned by the layer of experts, whose weight names they have.

    The K experts with the largest softmax probability plus correction bias are chosen; their weights are their
    probabilities over the sum of these, which counts as at least `moe_norm_min`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        gate: Gate,
        moe_statics: GateStatistics,
        balance: ExpertBalance,
        tp: TensorParallel = NO_TENSOR_PARALLEL,
    ) -> None:
        self.layer, self.experts, self.gate, self.moe_statics = layer, config.moe_num_experts, gate, moe_statics
        self._all_reduce = (
            Replicated(tp.group).combine if tp.sequence_parallel else no_all_reduce
        )  # its ranks divide the tokens
        self._token_shards = tp.size if tp.sequence_parallel else 1
        self._k, self._norm_min, self._balance = config.moe_k, config.moe_norm_min, balance

    def __call__(self, x_TH: paddle.Tensor) -> tuple[Routes, paddle.Tensor]:
        """Routes, and the logits [T, E] that `balanced` wants."""
        logits_TE = self.gate(x_TH)
        probabilities_TE = F.softmax(logits_TE)
        scores_TE = (probabilities_TE + self.moe_statics.e_score_correction_bias).detach()
        experts_TK = paddle.topk(scores_TE, self._k, axis=1)[1]
        chosen_TK = paddle.take_along_axis(probabilities_TE, experts_TK, axis=1)
        weights_TK = chosen_TK / paddle.clip(chosen_TK.sum(1, keepdim=True), min=self._norm_min)
        return Routes(experts_TK, weights_TK), logits_TE

    def with_aux_losses(
        self, routes: Routes, logits_TE: paddle.Tensor, experts_TK: np.ndarray, is_token_T: paddle.Tensor | None
    ) -> Routes:
        """The routes, with the gradients of the router's own losses joined to their weights; reports both.

        Args:
            experts_TK: `routes.experts` on the host.
            is_token_T: 1.0 for tokens, 0.0 for padding, which counts in no loss and no load; None: there is no padding.
        """
        settings, losses = self._balance.settings, dict[str, tuple[float, paddle.Tensor]]()
        token_weights_T = token_weights(logits_TE, is_token_T, self._all_reduce)
        if settings.aux_loss_lambda:
            loss = balance_loss(F.softmax(logits_TE), self._k, token_weights_T, self._all_reduce)
            losses["router_aux_loss"] = settings.aux_loss_lambda, loss
        if settings.z_loss_lambda:
            losses["router_z_loss"] = settings.z_loss_lambda, z_loss(logits_TE, token_weights_T, self._all_reduce)
        if settings.orthogonal_loss_lambda:  # of no token, so each rank that has a part of them gives a part
            factor = settings.orthogonal_loss_lambda / self._token_shards
            losses["router_orthogonal_loss"] = factor, self.gate(logits_TE, orthogonal_loss)
        counted = experts_TK if is_token_T is None else experts_TK[is_token_T.numpy() > 0]
        load_E = np.bincount(counted.reshape(-1), minlength=logits_TE.shape[1])
        self._balance.report(self.layer, {name: loss for name, (_, loss) in losses.items()}, load_E)
        weights_TK = routes.weights
        for factor, loss in losses.values():
            weights_TK = add_gradient(weights_TK, loss, factor * self._balance.loss_weight)
        return routes._replace(weights=weights_TK)

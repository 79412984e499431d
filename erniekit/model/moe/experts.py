"""A layer of experts: each token passes through a few of them, chosen by a router, and through the shared ones.

Shapes: T tokens, E experts, K of them per token, H hidden size, R rows (a token on its way to one expert).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.autograd import PyLayer

from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.autograd import filter_gradients, needs_grad
from erniekit.model.mlp import MLP
from erniekit.model.moe.all_to_all import order_backward
from erniekit.model.moe.dispatch import LOCAL_DISPATCHER, TokenDispatcher, local_expert_ids
from erniekit.model.moe.router import ExpertBalance, Gate, GateStatistics, Router, Routes
from erniekit.model.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel


class Experts(nn.Layer):
    """The experts of a layer that this rank has, each named by its index among all.

    Args:
        numbers: indices of the experts.
        run_all_experts: also run experts without rows.
        token_shard: which shard of the tokens they receive, under sequence parallelism.
    """

    def __init__(
        self, config: ModelConfig, numbers: range, *, run_all_experts: bool = False, token_shard: int = 0
    ) -> None:
        super().__init__()
        self.numbers, self.total, self._run_all_experts = numbers, config.moe_num_experts, run_all_experts
        unsharded = TensorParallel(rank=token_shard)  # an expert's matrices are never sharded
        for number in numbers:
            self.add_sublayer(str(number), MLP(config, config.moe_intermediate_size, unsharded))

    def __getitem__(self, number: int) -> MLP:
        return self._sub_layers[str(number)]

    def __iter__(self) -> Iterator[MLP]:
        return iter(self._sub_layers.values())

    def forward(self, rows_RH: paddle.Tensor, counts: np.ndarray) -> paddle.Tensor:
        """Run each expert once on its rows, which are contiguous: `counts[i]` for the i-th local expert."""
        running = np.arange(len(self.numbers)) if self._run_all_experts else np.flatnonzero(counts)
        if len(running) == 0:
            return rows_RH
        groups = _Split.apply(rows_RH, counts[running].tolist())
        return _Join.apply(*(self[self.numbers[i]](group) for i, group in zip(running.tolist(), groups, strict=True)))


class _Split(PyLayer):
    """Groups of consecutive rows, as views: `paddle.split` copies them."""

    @staticmethod
    def forward(ctx, rows_RH, counts):  # type: ignore[no-untyped-def]
        return tuple(_views(rows_RH, counts))

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        return paddle.concat(gradients)


class _Join(PyLayer):
    """The rows of all groups; the groups' gradients are views."""

    @staticmethod
    def forward(ctx, *groups):  # type: ignore[no-untyped-def]
        ctx.counts, ctx.needs_input_grad = [group.shape[0] for group in groups], needs_grad(*groups)
        return paddle.concat(groups)

    @staticmethod
    def backward(ctx, grad_RH):  # type: ignore[no-untyped-def]
        return filter_gradients(_views(grad_RH, ctx.counts), ctx.needs_input_grad)


def _views(rows_RH: paddle.Tensor, counts: list[int]) -> list[paddle.Tensor]:
    ends = np.cumsum(counts).tolist()
    return [rows_RH[end - count : end] for end, count in zip(ends, counts, strict=True)]


class MoE(nn.Layer):
    """Replaces a layer's MLP. Tokens are grouped by expert, so each expert runs once, on its own tokens.

    The ranks of `tp` shard the shared experts like an MLP. The matrices of a routed expert are never sharded: the ranks
    of `dispatcher` each have some of the experts.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        balance: ExpertBalance,
        tp: TensorParallel = NO_TENSOR_PARALLEL,
        dispatcher: TokenDispatcher = LOCAL_DISPATCHER,
    ) -> None:
        super().__init__()
        self.tp, self.dispatcher = tp, dispatcher
        architecture = config.architecture
        routing = architecture.routing(config)
        self.gate = Gate(config.hidden_size, config.moe_num_experts, routing.bias)
        self.moe_statics = GateStatistics(routing.correction_bias) if routing.correction_bias is not None else None
        numbers = local_expert_ids(config.moe_num_experts, dispatcher.group)
        token_shard = tp.rank if tp.sequence_parallel else 0
        self.experts = Experts(config, numbers, run_all_experts=dispatcher.run_all_experts, token_shard=token_shard)
        inner = architecture.shared_experts_size(config)
        self.shared_experts = MLP(config, inner, tp) if inner else None
        self.shared_expert_gate = Gate(config.hidden_size, 1) if architecture.shared_expert_gate else None
        self.router = Router(config, layer, self.gate, self.moe_statics, balance, tp)

    def forward(self, x_BSH: paddle.Tensor, is_token_BS: paddle.Tensor | None = None) -> paddle.Tensor:
        """Run the layer on x [B, S, H].

        Args:
            is_token_BS: 1.0 for tokens and 0.0 for padding, which no router loss counts; None: there is no padding.
        """
        x_TH = x_BSH.reshape([-1, x_BSH.shape[-1]])
        routes, logits_TE = self.router(x_TH)
        if paddle.in_dynamic_mode():
            experts_TK = routes.experts.numpy()
            if self.training:
                is_token_T = None if is_token_BS is None else is_token_BS.reshape([-1])
                routes = self.router.with_aux_losses(routes, logits_TE, experts_TK, is_token_T)
            out_TH = self.dispatcher(x_TH, routes.weights.astype(x_TH.dtype), experts_TK, self.experts)
        else:
            out_TH = self._all_experts(x_TH, routes)
        if self.shared_experts is not None:
            if self.tp.size > 1 and self.dispatcher.group is not None:  # both communicate
                x_TH, out_TH = order_backward(x_TH, out_TH)
            shared_TH = self.shared_experts(x_TH).reshape(out_TH.shape)
            if self.shared_expert_gate is not None:
                shared_TH = shared_TH * F.sigmoid(self.shared_expert_gate(x_TH)).astype(shared_TH.dtype)
            out_TH = out_TH + shared_TH
        return out_TH.reshape(x_BSH.shape)

    def _all_experts(self, x_TH: paddle.Tensor, routes: Routes) -> paddle.Tensor:
        """Compute the same sum with every expert on every token: a saved program cannot have groups of varying size."""
        chosen_TKE = F.one_hot(routes.experts, self.experts.total)
        weights_TE = paddle.matmul(routes.weights.unsqueeze(1), chosen_TKE).squeeze(1).astype(x_TH.dtype)
        outputs = [weights_TE[:, number : number + 1] * expert(x_TH) for number, expert in enumerate(self.experts)]
        return paddle.add_n(outputs)

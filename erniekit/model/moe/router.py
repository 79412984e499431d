"""Choose the experts of each token and their weights, with the losses that balance the experts.

Shapes: T tokens, E experts, K of them per token, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.autograd import PyLayer

from erniekit.config.sections.moe import MoeParameters
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.linear import ZEROS
from erniekit.model.moe.all_to_all import Replicated
from erniekit.model.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel

# Losses that keep experts in balance. A token loss is a mean over the tokens of one layer and one micro-batch, in which
# each token has the weight of `token_weights`. If ranks share these tokens, `all_reduce` sums a value over them.

AllReduce = Callable[[paddle.Tensor], paddle.Tensor]


def no_all_reduce(figure: paddle.Tensor) -> paddle.Tensor:
    """Return the value unchanged: one rank has all tokens."""
    return figure


@paddle.no_grad()
def token_weights(
    logits_TE: paddle.Tensor, is_token_T: paddle.Tensor | None, all_reduce: AllReduce = no_all_reduce
) -> paddle.Tensor:
    """Return float [T]: 1 / the number of tokens of the micro-batch for each token, 0 for padding.

    Args:
        is_token_T: 1.0 for tokens that count and 0.0 for padding; None: all count.
    """
    counted = paddle.ones(logits_TE.shape[:1], logits_TE.dtype) if is_token_T is None else is_token_T
    counted = counted.astype(logits_TE.dtype)
    return counted / all_reduce(counted.sum()).clip(min=1)  # some micro-batches contain only padding


def balance_loss(
    probabilities_TE: paddle.Tensor, moe_k: int, token_weights_T: paddle.Tensor, all_reduce: AllReduce = no_all_reduce
) -> paddle.Tensor:
    """Return E * sum over experts of f_e * P_e; it is moe_k if all experts get the same number of tokens.

    P_e is the mean probability of expert e, f_e the number of tokens, per token, that have e among their `moe_k` most
    likely experts. Fedus et al., 2021, arXiv:2101.03961, equations 4 to 6, with counts over all k choices as in
    ERNIE-4.5. The router's correction bias does not affect f. The gradient flows through P alone.
    """
    experts = probabilities_TE.shape[1]
    chosen = paddle.topk(probabilities_TE.detach(), moe_k, axis=1)[1]
    choices_TE = F.one_hot(chosen, experts).sum(1).astype(probabilities_TE.dtype)
    shares = token_weights_T.unsqueeze(0)
    means = all_reduce(paddle.concat([paddle.matmul(shares, values) for values in (choices_TE, probabilities_TE)]))
    return (means[0].detach() * means[1]).sum() * experts


def z_loss(
    logits_TE: paddle.Tensor, token_weights_T: paddle.Tensor, all_reduce: AllReduce = no_all_reduce
) -> paddle.Tensor:
    """Return the mean over tokens of (log sum over experts of exp(logit))^2. Zoph et al., 2022, arXiv:2202.08906, eq.
    5."""
    return all_reduce((paddle.logsumexp(logits_TE, axis=1).square() * token_weights_T).sum())


def orthogonal_loss(weight_EH: paddle.Tensor) -> paddle.Tensor:
    """Return the mean over pairs of experts of (cos(w_e, w_f) - [e = f])^2 for the router's rows w, as in ERNIE-4.5."""
    experts = weight_EH.shape[0]
    norms = paddle.sqrt(weight_EH.square().sum(1, keepdim=True))
    rows = weight_EH / paddle.clip(norms, min=1e-12)
    return (paddle.matmul(rows, rows, transpose_y=True) - paddle.eye(experts)).square().mean()


class _AddGradient(PyLayer):
    """Returns the value unchanged; in backward `loss` receives the gradient `scale`, as if scale * loss were minimised
    too."""

    @staticmethod
    def forward(ctx, value, loss, scale):  # type: ignore[no-untyped-def]
        ctx.scale = scale
        return paddle.assign(value)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, paddle.full([], ctx.scale, grad.dtype)


def add_gradient(value: paddle.Tensor, loss: paddle.Tensor, scale: float) -> paddle.Tensor:
    """Return `value`, through which backward also reaches the 0-d tensor `loss` with the gradient `scale`.

    So a layer's auxiliary loss need not be passed to the end of the model: it works under recomputation and in a middle
    stage of a pipeline (the idea of Megatron-LM's auxiliary loss scaler).
    """
    return value if loss.stop_gradient else _AddGradient.apply(value, loss, scale)


# State shared by the routers of a model: the weights of their losses, the current micro-batch, and their reports.


NO_BALANCE_LOSSES = MoeParameters(moe_aux_loss_lambda=0.0)


class ExpertBalance:
    """Shared by all routers of a model; the training loop calls `begin_micro_batch` and `end_step`.

    A recomputed layer reports twice. Reports are stored by micro-batch and layer, so the second replaces the first.

    Args:
        all_reduce_loads: sums an array over the ranks that have other tokens of a step.
    """

    section: MoeParameters

    def __init__(
        self, section: MoeParameters, all_reduce_loads: Callable[[np.ndarray], np.ndarray] = lambda loads: loads
    ) -> None:
        self.section, self._all_reduce_loads = section, all_reduce_loads
        self.loss_weight = 1.0  # this micro-batch's share of the step; the step's router loss is the weighted mean
        self._micro_batch = 0
        self._losses: dict[tuple[int, int, str], paddle.Tensor] = {}  # by micro-batch, layer and name
        self._loads: dict[tuple[int, int], np.ndarray] = {}

    def begin_micro_batch(self, micro_batch: int, loss_weight: float) -> None:
        self._micro_batch, self.loss_weight = micro_batch, loss_weight

    def report(self, layer: int, losses: dict[str, paddle.Tensor], load_E: np.ndarray) -> None:
        """Record a router's losses and the number of tokens that each of its experts received."""
        for name, loss in losses.items():
            self._losses[self._micro_batch, layer, name] = loss.detach()
        if self.section.moe_router_bias_update_rate:
            self._loads[self._micro_batch, layer] = load_E

    def reported(self, micro_batch: int | None = None) -> dict[str, tuple[paddle.Tensor, int]]:
        """Return each loss of a micro-batch of this step (default: the current one) by name, without its weight.

        Returns:
            Name -> (sum over the layers of this rank, 0-d; number of these layers).
        """
        number = self._micro_batch if micro_batch is None else micro_batch
        by_name: dict[str, list[paddle.Tensor]] = {}
        for (owner, _, name), loss in self._losses.items():
            if owner == number:
                by_name.setdefault(name, []).append(loss)
        return {name: (paddle.add_n(losses), len(losses)) for name, losses in by_name.items()}

    def end_step(self, routers: Iterable[Router]) -> None:
        """Raise the correction bias of experts with less than the mean load of the step and lower that of the others.

        bias += rate * sign(mean load - load); Wang et al., 2024, arXiv:2408.15664, algorithm 1. Frozen routers keep
        their bias.
        """
        rate = self.section.moe_router_bias_update_rate
        moving = [
            router
            for router in routers
            if rate and router.moe_statics is not None and not router.gate.weight.stop_gradient
        ]
        if moving:
            loads_RE = self._all_reduce_loads(np.array([self._load_of_step(router) for router in moving]))
            for router, load_E in zip(moving, loads_RE, strict=True):
                step = rate * np.sign(load_E.mean() - load_E)
                assert router.moe_statics is not None
                bias = router.moe_statics.e_score_correction_bias
                bias.set_value(bias + paddle.to_tensor(step[None]).astype(bias.dtype))
        self._loads.clear()
        self._losses.clear()

    def _load_of_step(self, router: Router) -> np.ndarray:
        loads = [load for (_, layer), load in self._loads.items() if layer == router.layer]
        return np.sum([np.zeros(router.experts), *loads], axis=0)


class Routes(NamedTuple):
    """Experts are int64 [T, K], the likeliest first; weights float32 [T, K]."""

    experts: paddle.Tensor
    weights: paddle.Tensor


class Gate(nn.Layer):
    """A score for each of E outputs: x W^T + b, always in float32; W [E, H] as Hugging Face stores it."""

    def __init__(self, hidden_size: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = self.create_parameter([outputs, hidden_size], default_initializer=ZEROS)
        self.bias = self.create_parameter([outputs], default_initializer=ZEROS, is_bias=True) if bias else None

    def forward(
        self, x_TH: paddle.Tensor, compute: Callable[[paddle.Tensor], paddle.Tensor] | None = None
    ) -> paddle.Tensor:
        """Return the logits [T, E], or `compute(weight)`, because the weight may only be used in here (see `Head`)."""
        if compute is not None:
            return compute(self.weight)
        logits_TE = paddle.matmul(x_TH.astype(self.weight.dtype), self.weight, transpose_y=True)
        return logits_TE if self.bias is None else logits_TE + self.bias


class GateStatistics(nn.Layer):
    """The correction bias, [1, E] or [E]: it only affects the choice of experts, and no gradient reaches it."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.e_score_correction_bias = self.create_parameter(list(shape), default_initializer=ZEROS)
        self.e_score_correction_bias.stop_gradient = True


def only_in_best_groups(scores_TE: paddle.Tensor, groups: int, chosen: int) -> paddle.Tensor:
    """Return the scores with 0 in all but the `chosen` groups of experts whose two largest scores have the largest sum.

    DeepSeek-V3, 2024, arXiv:2412.19437, section 2.1.2.
    """
    experts = scores_TE.shape[1]
    grouped_TGM = scores_TE.reshape([-1, groups, experts // groups])
    sums_TG = paddle.topk(grouped_TGM, 2, axis=2)[0].sum(2)
    best_TC = paddle.topk(sums_TG, chosen, axis=1)[1]
    kept_TG = F.one_hot(best_TC, groups).sum(1).astype(scores_TE.dtype)
    return (grouped_TGM * kept_TG.unsqueeze(2)).reshape([-1, experts])


def clear_correction_bias(model: nn.Layer) -> None:
    """Set the correction bias of every router to zero, so that experts are chosen by their probability alone."""
    for layer in model.sublayers():
        if isinstance(layer, GateStatistics):
            layer.e_score_correction_bias.set_value(paddle.zeros_like(layer.e_score_correction_bias))


class Router:
    """The gate and its statistics; the layer of experts owns both, for the sake of their weight names.

    The K experts with the largest score, plus the correction bias where there is one, are chosen. Their weights are
    their scores, in most families over the sum of these, which counts as at least `moe_norm_min`. `Routing` has the
    rest.
    """

    _balance: ExpertBalance

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        gate: Gate,
        moe_statics: GateStatistics | None,
        balance: ExpertBalance,
        tp: TensorParallel = NO_TENSOR_PARALLEL,
    ) -> None:
        self.layer, self.experts, self.gate, self.moe_statics = layer, config.moe_num_experts, gate, moe_statics
        self._all_reduce = (
            Replicated(tp.group).combine if tp.sequence_parallel else no_all_reduce
        )  # the group's ranks share the tokens
        self._token_shards = tp.size if tp.sequence_parallel else 1
        self._k, self._norm_min, self._balance = config.moe_k, config.moe_norm_min, balance
        self._routing = config.architecture.routing(config)

    def __call__(self, x_TH: paddle.Tensor) -> tuple[Routes, paddle.Tensor]:
        """Return the routes, and the logits [T, E] for `with_aux_losses`."""
        logits_TE = self.gate(x_TH)
        scores_TE = F.softmax(logits_TE) if self._routing.scores == "softmax" else F.sigmoid(logits_TE)
        choice_TE = scores_TE.detach()
        if self.moe_statics is not None:
            choice_TE = choice_TE + self.moe_statics.e_score_correction_bias
        if self._routing.groups > 1:
            choice_TE = only_in_best_groups(choice_TE, self._routing.groups, self._routing.chosen_groups)
        experts_TK = paddle.topk(choice_TE, self._k, axis=1)[1]
        weights_TK = paddle.take_along_axis(scores_TE, experts_TK, axis=1)
        if self._routing.normalizes:
            weights_TK = weights_TK / paddle.clip(weights_TK.sum(1, keepdim=True), min=self._norm_min)
        if self._routing.scale != 1.0:
            weights_TK = weights_TK * self._routing.scale
        return Routes(experts_TK, weights_TK), logits_TE

    def _probabilities(self, logits_TE: paddle.Tensor) -> paddle.Tensor:
        """Return the scores of all experts over their sum, for the balance loss."""
        if self._routing.scores == "softmax":
            return F.softmax(logits_TE)
        scores_TE = F.sigmoid(logits_TE)
        return scores_TE / scores_TE.sum(1, keepdim=True)

    def with_aux_losses(
        self, routes: Routes, logits_TE: paddle.Tensor, experts_TK: np.ndarray, is_token_T: paddle.Tensor | None
    ) -> Routes:
        """Attach the gradients of the router's losses to the weights of the routes; report losses and loads.

        Args:
            experts_TK: `routes.experts` on the host.
            is_token_T: 1.0 for tokens, 0.0 for padding, which counts in no loss and no load; None: there is no padding.
        """
        section = self._balance.section
        losses: dict[str, tuple[float, paddle.Tensor]] = {}
        token_weights_T = token_weights(logits_TE, is_token_T, self._all_reduce)
        if section.moe_aux_loss_lambda:
            loss = balance_loss(self._probabilities(logits_TE), self._k, token_weights_T, self._all_reduce)
            losses["router_aux_loss"] = section.moe_aux_loss_lambda, loss
        if section.moe_z_loss_lambda:
            losses["router_z_loss"] = section.moe_z_loss_lambda, z_loss(logits_TE, token_weights_T, self._all_reduce)
        if section.moe_orthogonal_loss_lambda:  # token-independent, so each rank adds a part
            factor = section.moe_orthogonal_loss_lambda / self._token_shards
            losses["router_orthogonal_loss"] = factor, self.gate(logits_TE, orthogonal_loss)
        counted = experts_TK if is_token_T is None else experts_TK[is_token_T.numpy() > 0]
        load_E = np.bincount(counted.reshape(-1), minlength=logits_TE.shape[1])
        self._balance.report(self.layer, {name: loss for name, (_, loss) in losses.items()}, load_E)
        weights_TK = routes.weights
        for factor, loss in losses.values():
            weights_TK = add_gradient(weights_TK, loss, factor * self._balance.loss_weight)
        return routes._replace(weights=weights_TK)

"""Losses that keep experts in balance, and how their gradients join the run's.

Shapes: T tokens, E experts, H hidden size. Losses of tokens are means over the tokens of one layer and one micro-batch,
each a token's `share` of 1. Where ranks divide these tokens, `add` adds a figure up over them.
"""

from __future__ import annotations

from collections.abc import Callable

import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

AllReduce = Callable[[paddle.Tensor], paddle.Tensor]


def no_all_reduce(figure: paddle.Tensor) -> paddle.Tensor:
    """The `add` of one rank that has all tokens."""
    return figure


@paddle.no_grad()
def token_weights(
    logits_TE: paddle.Tensor, is_token_T: paddle.Tensor | None, all_reduce: AllReduce = no_all_reduce
) -> paddle.Tensor:
    """[T]: 1 / the number of tokens of the micro-batch for each token, 0 for padding.

    Args:
        is_token_T: 1.0 for tokens that count and 0.0 for padding; None: all count.
    """
    counted = paddle.ones(logits_TE.shape[:1], logits_TE.dtype) if is_token_T is None else is_token_T
    counted = counted.astype(logits_TE.dtype)
    return counted / all_reduce(counted.sum()).clip(min=1)  # some micro-batches hold padding only


def balance_loss(
    probabilities_TE: paddle.Tensor, moe_k: int, token_weights_T: paddle.Tensor, all_reduce: AllReduce = no_all_reduce
) -> paddle.Tensor:
    """E * sum over experts of f_e * P_e; moe_k where every expert gets as many tokens as any other.

    P_e is the mean probability of expert e, f_e the number of tokens that have e among their `moe_k` most likely
    experts, per token. Fedus et al., 2021, arXiv:2101.03961, equations 4 to 6, with counts over all k choices as in
    ERNIE-4.5. The router's correction bias plays no part in f. The gradient flows through P alone.
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
    """Mean over tokens of (log sum over experts of exp(logit))^2. Zoph et al., 2022, arXiv:2202.08906, equation 5."""
    return all_reduce((paddle.logsumexp(logits_TE, axis=1).square() * token_weights_T).sum())


def orthogonal_loss(weight_EH: paddle.Tensor) -> paddle.Tensor:
    """Mean over pairs of experts of (cos(w_e, w_f) - [e = f])^2, for the router's rows w, as ERNIE-4.5 has it."""
    experts = weight_EH.shape[0]
    norms = paddle.sqrt(weight_EH.square().sum(1, keepdim=True))
    rows = weight_EH / paddle.clip(norms, min=1e-12)
    return (paddle.matmul(rows, rows, transpose_y=True) - paddle.eye(experts)).square().mean()


class _AddGradient(PyLayer):
    """The value unchanged; in backward `loss` receives the gradient `scale`, as if scale * loss were minimised too."""

    @staticmethod
    def forward(ctx, value, loss, scale):  # type: ignore[no-untyped-def]
        ctx.scale = scale
        return paddle.assign(value)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, paddle.full([], ctx.scale, grad.dtype)


def add_gradient(value: paddle.Tensor, loss: paddle.Tensor, scale: float) -> paddle.Tensor:
    """`value`, through which backward also reaches `loss`, a 0-d tensor, with the gradient `scale`.

    So a layer's own loss needs no way to the end of the model: it works under recomputation and in a middle stage of a
    pipeline (the idea of Megatron-LM's auxiliary loss scaler).
    """
    return value if loss.stop_gradient else _AddGradient.apply(value, loss, scale)

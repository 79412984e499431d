"""Divergences between a teacher's and a student's distribution of the next token, with their gradients by the logits.

Under tensor parallelism every rank has its shard of the vocabulary; ranks exchange a few numbers for each row.
Shapes: T rows, V columns on this rank. p is the student's distribution and q the teacher's, both at the temperature.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import paddle
from paddle import Tensor

from erniekit.model.tensor_parallel import TensorParallel

FORWARD_KL, REVERSE_KL, JENSEN_SHANNON = "forward_kl", "reverse_kl", "jsd"


class Divergence(NamedTuple):
    """Which divergence is minimised.

    Attributes:
        kind: `forward_kl`: KL(q || p), Hinton et al. 2015, arXiv:1503.02531. `reverse_kl`: KL(p || q), Gu et al. 2023,
            arXiv:2306.08543. `jsd`: beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p, Agarwal et
            al. 2023, arXiv:2306.13649, equation 1.
        beta: of `jsd`, between 0 and 1.
        temperature: T, by which the logits of both are divided. The value is multiplied by T squared, so that gradients
            have the size that they have at 1 (Hinton et al., section 2).
    """

    kind: str = FORWARD_KL
    beta: float = 0.5
    temperature: float = 1.0


def log_softmax(logits_TV: Tensor, tp: TensorParallel, temperature: float = 1.0) -> Tensor:
    """Return this rank's columns of log softmax(logits / temperature), at least float32 [T, V]."""
    logits_TV = in_full(logits_TV) / temperature
    shifted_TV = logits_TV - tp.maximum(logits_TV.max(-1)).unsqueeze(1)
    return shifted_TV - paddle.log(tp.sum(paddle.exp(shifted_TV).sum(-1))).unsqueeze(1)


def row_divergences(
    log_p_TV: Tensor, log_q_TV: Tensor, divergence: Divergence, tp: TensorParallel
) -> tuple[Tensor, Tensor]:
    """Return the divergence of every row, [T], and the gradient of their sum by the student's logits, [T, V].

    Args:
        log_p_TV: the student's log-probabilities at the temperature.
        log_q_TV: the teacher's; -inf where the teacher gives no probability, which KL(p || q) does not allow.
    """
    temperature, beta = divergence.temperature, divergence.beta
    p_TV, q_TV = paddle.exp(log_p_TV), paddle.exp(log_q_TV)
    if divergence.kind == FORWARD_KL:
        values_T = tp.sum(_weighted(q_TV, log_q_TV - log_p_TV).sum(-1))
        gradient_TV = p_TV - q_TV
    elif divergence.kind == REVERSE_KL:
        ratio_TV = log_p_TV - log_q_TV
        values_T = tp.sum((p_TV * ratio_TV).sum(-1))
        gradient_TV = p_TV * (ratio_TV - values_T.unsqueeze(1))
    else:
        log_m_TV = _log_add(log_q_TV + math.log(beta), log_p_TV + math.log1p(-beta))
        ratio_TV = log_p_TV - log_m_TV
        of_student_T = tp.sum((p_TV * ratio_TV).sum(-1))
        of_teacher_T = tp.sum(_weighted(q_TV, log_q_TV - log_m_TV).sum(-1))
        values_T = beta * of_teacher_T + (1 - beta) * of_student_T
        # d/dp[v] is (1 - beta) log(p[v] / m[v]): what the shares of p in m add sums up to nothing.
        gradient_TV = (1 - beta) * p_TV * (ratio_TV - of_student_T.unsqueeze(1))
    return values_T * temperature**2, gradient_TV * temperature


def first_choices(scores_TV: Tensor, tp: TensorParallel) -> Tensor:
    """Return the column of the whole vocabulary with the largest score of each row, int64 [T]; the first of equals."""
    best_T = scores_TV.argmax(-1)
    if tp.size == 1:
        return best_T
    width, peak_T = scores_TV.shape[1], scores_TV.max(-1)
    elsewhere_T = paddle.full_like(best_T, width * tp.size)
    return tp.minimum(paddle.where(peak_T == tp.maximum(peak_T), best_T + tp.rank * width, elsewhere_T))


def one_hot(columns_T: Tensor, like_TV: Tensor, tp: TensorParallel) -> Tensor:
    """Return this rank's columns of rows with a 1 at `columns_T`, of the shape and type of `like_TV`."""
    width = like_TV.shape[1]
    local_T = columns_T - tp.rank * width
    is_local_T = (local_T >= 0) & (local_T < width)
    rows = paddle.arange(columns_T.shape[0]) * width
    places_T = paddle.where(is_local_T, rows + local_T, paddle.full_like(local_T, like_TV.size))
    flat = paddle.zeros([like_TV.size + 1], like_TV.dtype)
    ones = paddle.ones(places_T.shape, like_TV.dtype)
    return paddle.scatter(flat, places_T, ones)[:-1].reshape(like_TV.shape)


def in_full(values: Tensor) -> Tensor:
    """Return values of 16 bits as float32, others as they are."""
    return values.astype("float32") if values.dtype in (paddle.bfloat16, paddle.float16) else values


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Return weights * values, 0 where the value is infinite, for then the weight is 0."""
    return paddle.where(paddle.isfinite(values), weights * values, paddle.zeros_like(weights))


def _log_add(a: Tensor, b: Tensor) -> Tensor:
    """Return log(exp(a) + exp(b)) for an a that may be -inf."""
    return paddle.maximum(a, b) + paddle.log1p(paddle.exp(-paddle.abs(a - b)))

"""The head of distillation: student, teacher, loss and gradient for one chunk of positions at a time.

Neither the student's nor the teacher's logits of a batch ever exist as a whole; what is kept of a teacher is its last
hidden states, or its likeliest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from erniekit.model import bf16
from erniekit.model.decoder import Decoder
from erniekit.model.divergence import Divergence, first_choices, in_full, log_softmax, one_hot, row_divergences
from erniekit.model.head import IGNORE_INDEX, NO_NEW_ROWS, chunk_rows
from erniekit.model.new_rows import NewRows, add_rows_gradient, hidden_gradient, logits_of
from erniekit.model.products import scale_in_place
from erniekit.model.tensor_parallel import TensorParallel


class TeacherRows(NamedTuple):
    """What a teacher says of some positions.

    Attributes:
        log_q: [T, V], this rank's columns of its log-probabilities at the temperature; -inf: none.
        first: its first choices, int64 [T].
    """

    log_q: Tensor
    first: Tensor


# (start, stop, temperature, columns on this rank) of the positions that have a label -> what the teacher says of them
TeacherOfRows = Callable[[int, int, float, int], TeacherRows]


class DistillationLoss(NamedTuple):
    """Sums over target tokens, 0-d.

    Attributes:
        loss_sum: share-weighted; carries the gradient.
        divergence_sum: of the divergence, times the temperature squared.
        nll_sum: of -log p[label] at the temperature 1.
        agreement_count: positions where student and teacher have the same first choice.
        correct_count: positions where the label is the student's first choice.
    """

    loss_sum: Tensor
    divergence_sum: Tensor
    nll_sum: Tensor
    agreement_count: Tensor
    correct_count: Tensor


def target_positions(labels_BS: Tensor) -> Tensor:
    """Return the positions that have a label among the B * S of a batch, int64 [T], in order."""
    return paddle.nonzero(labels_BS.flatten() != IGNORE_INDEX).flatten()


def target_states(decoder: Decoder, hidden_BSH: Tensor, labels_BS: Tensor) -> Tensor:
    """Return the last hidden states, after the final norm, at the positions that have a label: [T, H]."""
    states_BSH = decoder.head.tp.copy_to_tp(decoder.norm(hidden_BSH))
    return paddle.gather(states_BSH.reshape([-1, states_BSH.shape[-1]]), target_positions(labels_BS))


def teacher_of_states(teacher: Decoder, states_TH: Tensor) -> TeacherOfRows:
    """Return what computes a teacher's log-probabilities from its last hidden states, when they are asked for.

    Rows of logits that only one of student and teacher has are padding, which has no token: the teacher's are left out
    of its distribution, and to the student's it gives no probability.
    """
    head = teacher.head

    def rows(start: int, stop: int, temperature: float, width: int) -> TeacherRows:
        logits_TV = logits_of(states_TH[start:stop], head.projection, head.new_rows_here)
        if logits_TV.shape[1] != width:
            assert head.tp.size == 1, "ranks that divide rows of logits have those of the same tokens"
            logits_TV = with_columns(logits_TV, width)
        return TeacherRows(log_softmax(logits_TV, head.tp, temperature), first_choices(logits_TV, head.tp))

    return rows


def with_columns(logits_TV: Tensor, width: int) -> Tensor:
    """Return the first columns of logits, or -inf in the place of those that are lacking: [T, width]."""
    rows, own = logits_TV.shape
    if own >= width:
        return logits_TV[:, :width]
    return paddle.concat([logits_TV, paddle.full([rows, width - own], -math.inf, logits_TV.dtype)], 1)


def distillation_loss(
    decoder: Decoder,
    hidden_BSH: Tensor,
    labels_BS: Tensor,
    teacher: TeacherOfRows,
    divergence: Divergence,
    sft_share: float = 0.0,
) -> DistillationLoss:
    """Sum (1 - share) D(teacher, student) + share (-log p[label]) over the positions that have a label.

    Args:
        hidden_BSH: the student's last hidden states before the final norm.
        teacher: says what the teacher gives to the T positions with a label.
        sft_share: between 0 and 1.
    """
    head = decoder.head
    positions = target_positions(labels_BS)
    needs_gradient = paddle.is_grad_enabled()
    if positions.shape[0] == 0:  # ranks that communicate during backward must all compute every gradient
        states = head.tp.copy_to_tp(decoder.norm(hidden_BSH)).reshape([-1, hidden_BSH.shape[-1]])
        nothing = in_full(head(states[:1], lambda rows: head.logits_for_loss(rows)[0]).flatten()[:0].sum())
        none = paddle.zeros([])
        return DistillationLoss(nothing, none, none, none, none)
    states = target_states(decoder, hidden_BSH, labels_BS)
    labels = paddle.gather(labels_BS.flatten(), positions)

    def compute(rows: Tensor) -> tuple[Tensor, Tensor]:
        values, *place = head.new_rows_here or NO_NEW_ROWS
        settings = (teacher, divergence, sft_share, needs_gradient, head.tp)
        return _ChunkedDistillation.apply(rows, head.projection, values, labels, place, settings)

    loss_sum, sums = head(states, compute)
    return DistillationLoss(loss_sum, *(sums[number] for number in range(4)))


class _ChunkedDistillation(PyLayer):
    """Loss and gradient of a chunk of rows at once; only the gradients of hidden, W and new rows are kept.

    With G the gradient of the rows' losses by the logits, dhidden = G W and dW = G^T hidden.
    """

    @staticmethod
    def forward(ctx, hidden, projection, values, labels, place, settings):  # type: ignore[no-untyped-def]
        teacher, divergence, sft_share, needs_gradient, tp = settings
        new_rows = None if values is None else NewRows(values, *place)
        for_rows = needs_gradient and values is not None and not values.stop_gradient
        grad_rows = paddle.zeros_like(values) if for_rows else None
        for_hidden = needs_gradient and not hidden.stop_gradient
        for_projection = needs_gradient and not projection.stop_gradient
        grad_hidden, grad_projection = [], None
        loss_sums, sums = [], paddle.zeros([4], "float64")
        chunk = chunk_rows(*projection.shape)
        for start in range(0, hidden.shape[0], chunk):
            rows, targets = hidden[start : start + chunk], labels[start : start + chunk]
            said = teacher(start, start + rows.shape[0], divergence.temperature, projection.shape[0])
            logits = logits_of(rows, projection, new_rows)
            losses, gradient, found = _row_losses(logits, targets, said, divergence, sft_share, tp)
            loss_sums.append(losses.sum())
            sums = sums + found
            gradient = gradient.astype(hidden.dtype)
            if for_hidden:
                grad_hidden.append(hidden_gradient(gradient, projection, new_rows))
            if for_projection and grad_projection is None:
                grad_projection = bf16.head_matmul(gradient, rows, transpose_x=True)
            elif for_projection:
                bf16.head_add_matmul(grad_projection, gradient, rows)
            if new_rows is not None and grad_rows is not None:
                add_rows_gradient(grad_rows, new_rows, gradient, rows)
        ctx.gradients = (paddle.concat(grad_hidden) if for_hidden else None, grad_projection, grad_rows)
        ctx.has_new_rows = new_rows is not None
        ctx.mark_non_differentiable(sums)
        return paddle.add_n(loss_sums), sums

    @staticmethod
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        gradients = ctx.gradients if ctx.has_new_rows else ctx.gradients[:2]
        ctx.gradients = ()
        for gradient in gradients:
            if gradient is not None:
                scale_in_place(gradient, grad.astype(gradient.dtype))
        return tuple(gradients)


def _row_losses(
    logits_TV: Tensor,
    labels_T: Tensor,
    teacher: TeacherRows,
    divergence: Divergence,
    sft_share: float,
    tp: TensorParallel,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses of rows [T], the gradient of their sum by the logits [T, V], and the sums of the divergence, of
    -log p[label], of agreements and of correct choices, float64 [4]."""
    log_p_TV = log_softmax(logits_TV, tp, divergence.temperature)
    values_T, gradient_TV = row_divergences(log_p_TV, teacher.log_q.astype(log_p_TV.dtype), divergence, tp)
    plain_TV = log_p_TV if divergence.temperature == 1.0 else log_softmax(logits_TV, tp)
    labels_TV = one_hot(labels_T, plain_TV, tp)
    nll_T = -tp.sum((plain_TV * labels_TV).sum(-1))
    losses_T, gradient_TV = (1 - sft_share) * values_T, (1 - sft_share) * gradient_TV
    if sft_share:
        losses_T = losses_T + sft_share * nll_T
        gradient_TV = gradient_TV + sft_share * (paddle.exp(plain_TV) - labels_TV)
    first_T = first_choices(logits_TV, tp)
    sums = [values_T, nll_T, first_T == teacher.first, first_T == labels_T]
    return losses_T, gradient_TV, paddle.stack([each.astype("float64").sum() for each in sums])

"""The loss head: summed cross entropy over target tokens, or the log-probability of each of them.

Under tensor parallelism every rank has its shard of the vocabulary, and the full logits never exist: ranks exchange a
few numbers for each token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import paddle
from paddle.autograd import PyLayer

from erniekit.model import bf16
from erniekit.model.autograd import filter_gradients, needs_grad
from erniekit.model.cross_entropy import logits_gradient, row_losses
from erniekit.model.decoder import Decoder, Head
from erniekit.model.new_rows import NewRows, add_rows_gradient, hidden_gradient, logits_of
from erniekit.model.norm import expand_like
from erniekit.model.products import scale_in_place
from erniekit.model.tensor_parallel import TensorParallel

IGNORE_INDEX = -100
NO_NEW_ROWS = (None, 0, 0, 0)
CHUNK_LOGITS = 4 << 20  # logits of a chunk of the fused head, numbers (16 MiB); more for very large vocabularies


class TokenLoss(NamedTuple):
    """0-d tensors. Divide `loss_sum` once by the number of target tokens of the full optimizer step."""

    loss_sum: paddle.Tensor  # natural log; carries the gradient
    target_count: paddle.Tensor  # int64
    correct_count: paddle.Tensor  # int64; targets whose logit is the largest


class TokenLogProbabilities(NamedTuple):
    """Log-probabilities of the T positions that have a label, in order."""

    values: paddle.Tensor  # fp32 [T], natural logarithm; carries the gradient
    positions: paddle.Tensor  # int64 [T], into the B * S positions of the batch
    is_correct: paddle.Tensor  # bool [T]; whether the label's logit is the largest


def token_loss(
    decoder: Decoder,
    hidden_BSH: paddle.Tensor,
    labels_BS: paddle.Tensor,
    *,
    fused: bool = False,
    sparse: bool = False,
) -> TokenLoss:
    """Sum -log softmax(hidden W^T)[label] over the positions whose label is not -100.

    Args:
        hidden_BSH: the last hidden states.
        labels_BS: int64, already shifted: position i has the token it should predict.
        fused: compute head, loss and gradient chunk by chunk, so that the full logits never exist; positions
            without a label are left out.
        sparse: leave out positions without a label before the head.
    """
    hidden = _rows(decoder, hidden_BSH)
    labels = labels_BS.reshape([-1])
    target_count = (labels != IGNORE_INDEX).sum()
    if sparse or fused:
        positions = paddle.nonzero(labels != IGNORE_INDEX).flatten()
        if positions.shape[0] == 0:
            return TokenLoss(_empty_logits(decoder.head, hidden).sum(), target_count, target_count)
        if positions.shape[0] < labels.shape[0]:
            hidden, labels = paddle.gather(hidden, positions), paddle.gather(labels, positions)
    head, needs_gradient = decoder.head, paddle.is_grad_enabled()

    def compute(rows: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        if fused:
            return loss_of_rows(rows, head.projection, labels, head.tp, head.new_rows_here, needs_gradient)
        logits, tp = head.logits_for_loss(rows)
        return loss_of_logits(logits, labels, tp)

    loss_sum, correct_count = head(hidden, compute)
    return TokenLoss(loss_sum, target_count, correct_count)


def loss_of_logits(
    logits_TV: paddle.Tensor, labels_T: paddle.Tensor, tp: TensorParallel
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the sum of -log softmax(logits)[label] of the rows that have a label, and how many of these labels have
    the largest logit; 0-d.

    Args:
        tp: the ranks that divide the columns of the logits.
    """
    return _CrossEntropy.apply(logits_TV, labels_T, tp)


def loss_of_rows(
    hidden_TH: paddle.Tensor,
    projection_VH: paddle.Tensor,
    labels_T: paddle.Tensor,
    tp: TensorParallel,
    new_rows: NewRows | None = None,
    needs_gradient: bool = True,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the same for logits = hidden W^T, which are computed chunk by chunk; all rows have a label.

    Args:
        new_rows: rows that stand for some of W's.
        needs_gradient: whether to compute gradients, which is done with the loss.
    """
    values, *place = new_rows or NO_NEW_ROWS
    return _FusedHeadLoss.apply(hidden_TH, projection_VH, values, labels_T, place, needs_gradient, tp)


def token_log_probabilities(
    decoder: Decoder,
    hidden_BSH: paddle.Tensor,
    labels_BS: paddle.Tensor,
    *,
    fused: bool = False,
    sparse: bool = False,
) -> TokenLogProbabilities:
    """Compute log softmax(hidden W^T)[label] of every position whose label is not -100.

    Args:
        hidden_BSH: the last hidden states.
        labels_BS: int64, already shifted: position i has the token it should predict.
        fused: compute chunk by chunk, so that the full logits never exist; they are recomputed in the backward
            pass, because only then the gradient of each token is known.
        sparse: leave out positions without a label before the head.
    """
    hidden, head = _rows(decoder, hidden_BSH), decoder.head
    labels = labels_BS.reshape([-1])
    positions = paddle.nonzero(labels != IGNORE_INDEX).flatten()
    if positions.shape[0] == 0:
        return TokenLogProbabilities(_empty_logits(head, hidden), positions, labels[:0] != IGNORE_INDEX)
    everywhere = not (fused or sparse)
    if everywhere:
        targets = paddle.where(labels != IGNORE_INDEX, labels, paddle.zeros_like(labels))
    else:
        hidden, targets = paddle.gather(hidden, positions), paddle.gather(labels, positions)

    def compute(rows: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        if fused:
            values, *place = head.new_rows_here or NO_NEW_ROWS
            return _FusedLogProbabilities.apply(rows, head.projection, values, targets, place, head.tp)
        logits, tp = head.logits_for_loss(rows)
        return _LogProbabilities.apply(logits, targets, tp)

    values, is_correct = head(hidden, compute)
    if everywhere:
        values, is_correct = paddle.gather(values, positions), paddle.gather(is_correct, positions)
    return TokenLogProbabilities(values, positions, is_correct)


def _rows(decoder: Decoder, hidden_BSH: paddle.Tensor) -> paddle.Tensor:
    """Return the hidden states of all tokens, [B * S, H], as input of the head."""
    return decoder.head.tp.copy_to_tp(hidden_BSH).reshape([-1, hidden_BSH.shape[-1]])


def _empty_logits(head: Head, hidden: paddle.Tensor) -> paddle.Tensor:
    """Return an empty loss, fp32 [0], for a batch without labels; it still depends on all weights.

    Ranks that communicate during backward must all compute every gradient.
    """
    return head(hidden[:1], lambda rows: head.logits_for_loss(rows)[0]).flatten()[:0]


def chunk_rows(vocabulary: int, hidden: int) -> int:
    """Return the rows per chunk of the fused head, at least H / 4, because each chunk adds to the
    full gradient of W."""
    return max(1, CHUNK_LOGITS // vocabulary, hidden // 4)


class _CrossEntropy(PyLayer):
    """Summed cross entropy of logits [T, V]; with P their softmax and E the one-hot labels the gradient is P - E in
    rows with a label, else 0.

    Paddle's `cross_entropy` on a CPU limits a token's loss to 64: it raises log-probabilities below -64.
    """

    @staticmethod
    def forward(ctx, logits, labels, tp):  # type: ignore[no-untyped-def]
        has_target = labels != IGNORE_INDEX
        targets = paddle.where(has_target, labels, paddle.zeros_like(labels))
        weights = has_target.astype(logits.dtype)
        losses, is_correct, grad_logits = row_losses(logits, targets, tp, weights)
        ctx.save_for_backward(grad_logits)
        correct_count = (is_correct & has_target).sum()
        ctx.mark_non_differentiable(correct_count)
        return (losses * weights).sum(), correct_count

    @staticmethod
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        (grad_logits,) = ctx.saved_tensor()
        return grad_logits.scale(grad)


class _FusedHeadLoss(PyLayer):
    """Loss and gradient of a chunk of rows at once; only the gradients of hidden and W are kept.

    With P = softmax(hidden W^T) and E the one-hot labels, the gradients of the summed loss are dhidden = (P - E) W and
    dW = (P - E)^T hidden; P - E takes the place of the logits. Of a W with new rows only these get a gradient.
    """

    @staticmethod
    def forward(ctx, hidden, projection, values, labels, place, needs_gradient, tp):  # type: ignore[no-untyped-def]
        new_rows = None if values is None else NewRows(values, *place)
        for_rows = needs_gradient and values is not None and not values.stop_gradient
        grad_rows = paddle.zeros_like(values) if for_rows else None
        for_hidden = needs_gradient and not hidden.stop_gradient
        for_projection = needs_gradient and not projection.stop_gradient
        grad_hidden, grad_projection = [], None
        loss_sum = paddle.zeros([], hidden.dtype)
        correct_count = paddle.zeros([], "int64")
        chunk = chunk_rows(*projection.shape)
        for start in range(0, hidden.shape[0], chunk):
            rows, targets = hidden[start : start + chunk], labels[start : start + chunk]
            logits = logits_of(rows, projection, new_rows)
            losses, is_correct, grad_logits = row_losses(logits, targets, tp, in_place=True, gradient=needs_gradient)
            loss_sum = loss_sum + losses.sum()
            correct_count = correct_count + is_correct.sum()
            if for_hidden:
                grad_hidden.append(hidden_gradient(grad_logits, projection, new_rows))
            if for_projection:
                grad_projection = _add_product(grad_projection, grad_logits, rows)
            if new_rows is not None and grad_rows is not None:
                add_rows_gradient(grad_rows, new_rows, grad_logits, rows)
        ctx.gradients = (paddle.concat(grad_hidden) if for_hidden else None, grad_projection, grad_rows)
        ctx.has_new_rows = new_rows is not None
        ctx.mark_non_differentiable(correct_count)
        return loss_sum, correct_count

    @staticmethod
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        gradients = ctx.gradients if ctx.has_new_rows else ctx.gradients[:2]
        ctx.gradients = ()
        for gradient in gradients:
            if gradient is not None:
                scale_in_place(gradient, grad)
        return tuple(gradients)


class _LogProbabilities(PyLayer):
    """Log-probabilities of the targets from logits [T, V]; the gradient of row t is g[t] (E - P)."""

    @staticmethod
    def forward(ctx, logits, targets, tp):  # type: ignore[no-untyped-def]
        losses, is_correct, grad_losses = row_losses(logits, targets, tp)
        ctx.save_for_backward(grad_losses)
        ctx.mark_non_differentiable(is_correct)
        return -losses, is_correct

    @staticmethod
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        (grad_losses,) = ctx.saved_tensor()
        return grad_losses * expand_like(-grad.unsqueeze(1), grad_losses)


class _FusedLogProbabilities(PyLayer):
    """Log-probabilities from hidden [T, H] and W [V, H], a chunk of rows at a time, recomputed in backward.

    With g the gradients of the rows and E the one-hot targets, dhidden = g (E - P) W and dW = (g (E - P))^T hidden; the
    factor takes the place of the logits. Of a W with new rows only these get a gradient.
    """

    @staticmethod
    def forward(ctx, hidden, projection, values, targets, place, tp):  # type: ignore[no-untyped-def]
        weights = [hidden, projection] if values is None else [hidden, projection, values]
        new_rows = None if values is None else NewRows(values, *place)
        ctx.save_for_backward(targets, *weights)
        ctx.tp, ctx.place, ctx.products = tp, place, bf16.enabled()
        ctx.needs_input_grad = needs_grad(*weights)
        log_probabilities, is_correct = [], []
        for rows in _chunks(hidden, projection):
            logits = logits_of(hidden[rows], projection, new_rows)
            losses, correct, _ = row_losses(logits, targets[rows], tp, in_place=True, gradient=False)
            log_probabilities.append(-losses)
            is_correct.append(correct)
        correct_T = paddle.concat(is_correct)
        ctx.mark_non_differentiable(correct_T)
        return paddle.concat(log_probabilities), correct_T

    @staticmethod
    @bf16.as_in_forward
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        targets, hidden, projection, *values = ctx.saved_tensor()
        new_rows = NewRows(*values, *ctx.place) if values else None
        for_hidden, for_projection, *for_rows = ctx.needs_input_grad
        grad_hidden, grad_projection = [], None
        grad_rows = [paddle.zeros_like(each) for each in values]
        for rows in _chunks(hidden, projection):
            logits = logits_of(hidden[rows], projection, new_rows)
            grad_logits = logits_gradient(logits, targets[rows], -grad[rows], ctx.tp)
            if for_hidden:
                grad_hidden.append(hidden_gradient(grad_logits, projection, new_rows))
            if for_projection:
                grad_projection = _add_product(grad_projection, grad_logits, hidden[rows])
            if new_rows is not None and any(for_rows):
                add_rows_gradient(grad_rows[0], new_rows, grad_logits, hidden[rows])
        gradients = (paddle.concat(grad_hidden) if for_hidden else None, grad_projection, *grad_rows)
        return filter_gradients(gradients, ctx.needs_input_grad)


def _add_product(total: paddle.Tensor | None, a: paddle.Tensor, b: paddle.Tensor) -> paddle.Tensor:
    """Return total + a^T b, in the place of the total if there is one already."""
    if total is None:
        return bf16.head_matmul(a, b, transpose_x=True)
    bf16.head_add_matmul(total, a, b)
    return total


def _chunks(hidden_TH: paddle.Tensor, projection_VH: paddle.Tensor) -> Iterator[slice]:
    chunk = chunk_rows(*projection_VH.shape)
    for start in range(0, hidden_TH.shape[0], chunk):
        yield slice(start, start + chunk)

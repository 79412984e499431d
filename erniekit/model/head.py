"""From hidden states to the loss: summed cross entropy over target tokens, or the log-probability of each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from erniekit.model.autograd import given, needed
from erniekit.model.decoder import Decoder

NO_TARGET = -100
CHUNK_LOGITS = 4 << 20  # logits the fused head holds at once, numbers (16 MiB); more for very large vocabularies


class TokenLoss(NamedTuple):
    """0-d tensors. Divide `loss_sum` by the target tokens of the whole optimizer step, once."""

    loss_sum: paddle.Tensor  # natural log; carries the gradient
    target_count: paddle.Tensor  # int64
    correct_count: paddle.Tensor  # int64; targets whose logit is the largest


class TokenLogProbabilities(NamedTuple):
    """Of the T positions that have a label, in their order."""

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
    """Sum of -log softmax(hidden W^T)[label] over the positions whose label is not -100.

    Args:
        labels_BS: int64, already shifted: position i holds the token it should predict.
        fused: compute head, loss and gradient chunk by chunk, so that the logits never exist whole.
            Positions without a label are left out of the chunks.
        sparse: leave positions without a label out before the head.
    """
    hidden = hidden_BSH.reshape([-1, hidden_BSH.shape[-1]])
    labels = labels_BS.reshape([-1])
    target_count = (labels != NO_TARGET).sum()
    if sparse or fused:
        positions = paddle.nonzero(labels != NO_TARGET).flatten()
        if positions.shape[0] == 0:
            return TokenLoss(hidden.sum() * 0.0, target_count, target_count)
        if positions.shape[0] < labels.shape[0]:
            hidden, labels = paddle.gather(hidden, positions), paddle.gather(labels, positions)
    if fused:
        needs_gradient = paddle.is_grad_enabled()
        loss_sum, correct_count = _FusedHeadLoss.apply(hidden, decoder.head.projection, labels, needs_gradient)
    else:
        loss_sum, correct_count = _CrossEntropy.apply(decoder.head(hidden), labels)
    return TokenLoss(loss_sum, target_count, correct_count)


def token_log_probabilities(
    decoder: Decoder,
    hidden_BSH: paddle.Tensor,
    labels_BS: paddle.Tensor,
    *,
    fused: bool = False,
    sparse: bool = False,
) -> TokenLogProbabilities:
    """log softmax(hidden W^T)[label] of every position whose label is not -100.

    Args:
        labels_BS: int64, already shifted: position i holds the token it should predict.
        fused: chunk by chunk, so that the logits never exist whole; they are computed again in the backward pass,
            which knows only then how much each token counts.
        sparse: leave positions without a label out before the head.
    """
    hidden = hidden_BSH.reshape([-1, hidden_BSH.shape[-1]])
    labels = labels_BS.reshape([-1])
    positions = paddle.nonzero(labels != NO_TARGET).flatten()
    if positions.shape[0] == 0:
        return TokenLogProbabilities(hidden[:0, 0], positions, labels[:0] != NO_TARGET)
    targets = paddle.gather(labels, positions)
    if fused or sparse:
        rows = paddle.gather(hidden, positions)
        if fused:
            values, is_correct = _FusedLogProbabilities.apply(rows, decoder.head.projection, targets)
        else:
            values, is_correct = _LogProbabilities.apply(decoder.head(rows), targets)
        return TokenLogProbabilities(values, positions, is_correct)
    everywhere = paddle.where(labels != NO_TARGET, labels, paddle.zeros_like(labels))
    values, is_correct = _LogProbabilities.apply(decoder.head(hidden), everywhere)
    return TokenLogProbabilities(paddle.gather(values, positions), positions, paddle.gather(is_correct, positions))


def chunk_rows(vocabulary: int, hidden: int) -> int:
    """Rows the fused head takes at once. Not fewer than H / 4, because each chunk adds to the whole gradient of W."""
    return max(1, CHUNK_LOGITS // vocabulary, hidden // 4)


class _CrossEntropy(PyLayer):
    """Summed cross entropy of whole logits [T, V]; the gradient is P - E in rows with a label, else 0.

    Paddle's own `cross_entropy` on a CPU never gives a token more than 64: it raises log-probabilities below -64.
    """

    @staticmethod
    def forward(ctx, logits, labels):  # type: ignore[no-untyped-def]
        has_target = labels != NO_TARGET
        targets = paddle.where(has_target, labels, paddle.zeros_like(labels))
        losses, is_correct, probabilities = _row_losses(logits, targets, F.softmax)
        ctx.save_for_backward(probabilities, targets, has_target)
        correct_count = (is_correct & has_target).sum()
        ctx.mark_non_differentiable(correct_count)
        return (losses * has_target.astype(losses.dtype)).sum(), correct_count

    @staticmethod
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        probabilities, targets, has_target = ctx.saved_tensor()
        row_weights = has_target.astype(grad.dtype) * grad
        grad_logits = probabilities * row_weights.unsqueeze(1)
        flat = grad_logits.reshape([-1])
        flat.index_add_(_flat_positions(targets, probabilities.shape[1]), 0, -row_weights)
        return flat.reshape(probabilities.shape)


class _FusedHeadLoss(PyLayer):
    """Loss and gradient of a chunk of rows in one go; only the gradients of hidden and W are kept.

    With P = softmax(hidden W^T) and E the one-hot labels, the gradients of the summed loss are
    dhidden = (P - E) W = P W - W[labels] and dW = (P - E)^T hidden, so E is never formed.
    """

    @staticmethod
    def forward(ctx, hidden, projection, labels, needs_gradient):  # type: ignore[no-untyped-def]
        for_hidden = needs_gradient and not hidden.stop_gradient
        for_projection = needs_gradient and not projection.stop_gradient
        grad_hidden = []
        grad_projection = paddle.zeros_like(projection) if for_projection else None
        loss_sum = paddle.zeros([], hidden.dtype)
        correct_count = paddle.zeros([], "int64")
        chunk = chunk_rows(*projection.shape)
        for start in range(0, hidden.shape[0], chunk):
            rows, targets = hidden[start : start + chunk], labels[start : start + chunk]
            logits = paddle.matmul(rows, projection, transpose_y=True)
            losses, is_correct, probabilities = _row_losses(logits, targets, F.softmax_)
            loss_sum = loss_sum + losses.sum()
            correct_count = correct_count + is_correct.sum()
            if for_hidden:
                grad_hidden.append(paddle.matmul(probabilities, projection).subtract_(projection[targets]))
            if grad_projection is not None:
                grad_projection.add_(paddle.matmul(probabilities, rows, transpose_x=True))
                grad_projection.index_add_(targets, 0, -rows)
        ctx.gradients = (paddle.concat(grad_hidden) if for_hidden else None, grad_projection)
        ctx.mark_non_differentiable(correct_count)
        return loss_sum, correct_count

    @staticmethod
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        grad_hidden, grad_projection = ctx.gradients
        ctx.gradients = ()
        return (
            None if grad_hidden is None else grad_hidden.multiply_(grad),
            None if grad_projection is None else grad_projection.multiply_(grad),
        )


class _LogProbabilities(PyLayer):
    """Log-probabilities of the targets from whole logits [T, V]; the gradient of row t is g[t] (E - P)."""

    @staticmethod
    def forward(ctx, logits, targets):  # type: ignore[no-untyped-def]
        losses, is_correct, probabilities = _row_losses(logits, targets, F.softmax)
        ctx.save_for_backward(probabilities, targets)
        ctx.mark_non_differentiable(is_correct)
        return -losses, is_correct

    @staticmethod
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        probabilities, targets = ctx.saved_tensor()
        flat = (probabilities * -grad.unsqueeze(1)).reshape([-1])
        flat.index_add_(_flat_positions(targets, probabilities.shape[1]), 0, grad)
        return flat.reshape(probabilities.shape)


class _FusedLogProbabilities(PyLayer):
    """The same from hidden [T, H] and W [V, H], a chunk of rows at a time, twice.

    With g the gradients of the rows and E the one-hot targets, dhidden = g (E - P) W = g W[targets] - (g P) W and
    dW = (g (E - P))^T hidden, so E is never formed.
    """

    @staticmethod
    def forward(ctx, hidden, projection, targets):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(hidden, projection, targets)
        ctx.wanted = needed(hidden, projection)
        values, is_correct = [], []
        for rows in _chunks(hidden, projection):
            logits = paddle.matmul(hidden[rows], projection, transpose_y=True)
            losses, correct, _ = _row_losses(logits, targets[rows], F.softmax_)
            values.append(-losses)
            is_correct.append(correct)
        correct_T = paddle.concat(is_correct)
        ctx.mark_non_differentiable(correct_T)
        return paddle.concat(values), correct_T

    @staticmethod
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        hidden, projection, targets = ctx.saved_tensor()
        for_hidden, for_projection = ctx.wanted
        grad_hidden = []
        grad_projection = paddle.zeros_like(projection) if for_projection else None
        for rows in _chunks(hidden, projection):
            weights = grad[rows].unsqueeze(1)
            logits = paddle.matmul(hidden[rows], projection, transpose_y=True)
            weighted = F.softmax_(logits) * weights
            if for_hidden:
                grad_hidden.append(projection[targets[rows]] * weights - paddle.matmul(weighted, projection))
            if grad_projection is not None:
                grad_projection.subtract_(paddle.matmul(weighted, hidden[rows], transpose_x=True))
                grad_projection.index_add_(targets[rows], 0, hidden[rows] * weights)
        return given((paddle.concat(grad_hidden) if for_hidden else None, grad_projection), ctx.wanted)


def _chunks(hidden_TH: paddle.Tensor, projection_VH: paddle.Tensor) -> Iterator[slice]:
    chunk = chunk_rows(*projection_VH.shape)
    for start in range(0, hidden_TH.shape[0], chunk):
        yield slice(start, start + chunk)


def _row_losses(
    logits_TV: paddle.Tensor, targets_T: paddle.Tensor, softmax: Callable[[paddle.Tensor], paddle.Tensor]
) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    """Per row -log softmax(logits)[target], whether the target's logit is the largest, and the softmax itself.

    `softmax` may work in place. The loss is peak - logit - log P[peak], which stays exact for any logits: the largest
    probability is at least 1 / V, so its logarithm is safe.
    """
    best = logits_TV.argmax(-1)
    margins = _pick(logits_TV, best) - _pick(logits_TV, targets_T)
    probabilities_TV = softmax(logits_TV)
    return margins - paddle.log(_pick(probabilities_TV, best)), best == targets_T, probabilities_TV


def _pick(rows_TV: paddle.Tensor, columns_T: paddle.Tensor) -> paddle.Tensor:
    """rows[t, columns[t]] for every t."""
    return paddle.gather(rows_TV.reshape([-1]), _flat_positions(columns_T, rows_TV.shape[1]))


def _flat_positions(columns_T: paddle.Tensor, width: int) -> paddle.Tensor:
    return paddle.arange(columns_T.shape[0]) * width + columns_T

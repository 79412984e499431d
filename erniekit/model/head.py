"""From hidden states to the loss: summed cross entropy over target tokens, plain or fused in chunks."""

from __future__ import annotations

from typing import NamedTuple

import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from erniekit.model.decoder import Decoder

NO_TARGET = -100
CHUNK_LOGITS = 4 << 20  # logits held at once by the fused head, numbers (16 MiB in float32)


class TokenLoss(NamedTuple):
    """0-d tensors. Divide `loss_sum` by the target tokens of the whole optimizer step, once."""

    loss_sum: paddle.Tensor  # natural log; carries the gradient
    target_count: paddle.Tensor  # int64
    correct_count: paddle.Tensor  # int64; targets whose logit is the largest


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
        projection = decoder.head.projection
        needs_gradient = paddle.is_grad_enabled()
        loss_sum, correct_count = _FusedHeadLoss.apply(hidden, projection, labels, needs_gradient)
        return TokenLoss(loss_sum, target_count, correct_count)
    logits = decoder.head(hidden)
    loss_sum = F.cross_entropy(logits, labels, reduction="sum", ignore_index=NO_TARGET)
    return TokenLoss(loss_sum, target_count, (logits.detach().argmax(-1) == labels).sum())


def _pick(rows_TV: paddle.Tensor, columns_T: paddle.Tensor) -> paddle.Tensor:
    """rows[t, columns[t]] for every t."""
    count, width = rows_TV.shape
    return paddle.gather(rows_TV.reshape([-1]), paddle.arange(count) * width + columns_T)


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
        chunk = max(1, CHUNK_LOGITS // projection.shape[0])
        for start in range(0, hidden.shape[0], chunk):
            rows, targets = hidden[start : start + chunk], labels[start : start + chunk]
            logits = paddle.matmul(rows, projection, transpose_y=True)
            best = logits.argmax(-1)
            correct_count = correct_count + (best == targets).sum()
            # log sum exp = peak - log P[best]: the largest probability is at least 1 / V, so its logarithm is safe.
            margins = _pick(logits, best) - _pick(logits, targets)
            probabilities = F.softmax_(logits)
            loss_sum = loss_sum + (margins - paddle.log(_pick(probabilities, best))).sum()
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

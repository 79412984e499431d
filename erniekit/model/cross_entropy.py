"""Softmax cross entropy of rows of logits, with its gradient by the logits.

Under tensor parallelism every rank has its shard of the vocabulary; ranks exchange a few numbers for each row.
Shapes: T rows, V columns of the logits on this rank. P is the softmax, and E has a 1 at the target of each row.
"""

from __future__ import annotations

import paddle
import paddle.nn.functional as F

from erniekit.model import native
from erniekit.model.norm import expand_like
from erniekit.model.tensor_parallel import TensorParallel

KERNEL = ("cross_entropy", "llpppppp")


def row_losses(
    logits_TV: paddle.Tensor,
    targets_T: paddle.Tensor,
    tp: TensorParallel,
    weights_T: paddle.Tensor | None = None,
    *,
    in_place: bool = False,
    gradient: bool = True,
) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor | None]:
    """Return per row -log softmax(logits)[target], whether the target's logit is the largest, and the gradient of the
    sum of weights * losses by the logits.

    The loss is peak - logit + log(sum of exp(logit - peak)), which is exact for any logits; in Paddle's operators the
    last term is -log P[peak], and the largest probability is at least 1 / V, so its logarithm is safe.

    Args:
        weights_T: None: all are 1.
        in_place: the gradient, or what leads to the losses, may take the place of the logits.
        gradient: whether to compute it; None is returned if not.
    """
    if tp.size == 1 and (found := _native_row_losses(logits_TV, targets_T, weights_T, in_place, gradient)) is not None:
        return found
    if tp.size > 1:
        losses, is_correct, probabilities_TV = _vocab_parallel_row_losses(logits_TV, targets_T, tp)
    else:
        best = logits_TV.argmax(-1)
        margins = _pick(logits_TV, best) - _pick(logits_TV, targets_T)
        probabilities_TV = (F.softmax_ if in_place else F.softmax)(logits_TV)
        losses, is_correct = margins - paddle.log(_pick(probabilities_TV, best)), best == targets_T
    grad_TV = _subtract_one_hot(probabilities_TV, targets_T, weights_T, tp) if gradient else None
    return losses, is_correct, grad_TV


def _native_row_losses(
    logits_TV: paddle.Tensor,
    targets_T: paddle.Tensor,
    weights_T: paddle.Tensor | None,
    in_place: bool,
    gradient: bool,
) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor | None] | None:
    """Compute `row_losses` in one pass over each row; None where no native kernel runs."""
    kernel = native.kernel(*KERNEL, logits_TV, *([] if weights_T is None else [weights_T]))
    if kernel is None or targets_T.dtype != paddle.int64:
        return None
    targets_T = targets_T.contiguous()
    losses, is_correct = paddle.empty(targets_T.shape, logits_TV.dtype), paddle.empty(targets_T.shape, "bool")
    grad_TV = (logits_TV if in_place else paddle.empty_like(logits_TV)) if gradient else None
    pointers = native.pointers(logits_TV, targets_T, weights_T, losses, is_correct, grad_TV)
    kernel(*logits_TV.shape, *pointers)
    return losses, is_correct, grad_TV


def logits_gradient(
    logits_TV: paddle.Tensor, targets_T: paddle.Tensor, weights_T: paddle.Tensor, tp: TensorParallel
) -> paddle.Tensor:
    """Return weights (P - E), the gradient of the rows' losses, in the place of the logits."""
    if tp.size == 1 and targets_T.dtype == paddle.int64:
        targets_T, weights_T = targets_T.contiguous(), weights_T.contiguous()
        if (kernel := native.kernel(*KERNEL, logits_TV, weights_T)) is not None:
            kernel(*logits_TV.shape, *native.pointers(logits_TV, targets_T, weights_T, None, None, logits_TV))
            return logits_TV
    probabilities_TV = F.softmax_(logits_TV) if tp.size == 1 else _vocab_parallel_softmax(logits_TV, tp)[0]
    return _subtract_one_hot(probabilities_TV, targets_T, weights_T, tp)


def _vocab_parallel_row_losses(
    logits_TV: paddle.Tensor, targets_T: paddle.Tensor, tp: TensorParallel
) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    """Compute `row_losses` from this rank's columns of the logits; among equal largest logits the first counts, as in
    argmax."""
    width = logits_TV.shape[1]
    columns_T, is_local_T = _local_columns(targets_T, width, tp)
    at_target_T = tp.sum(_zero_nonlocal(_pick(logits_TV, columns_T), is_local_T))
    best_T = logits_TV.argmax(-1)
    local_peak_T = _pick(logits_TV, best_T)
    probabilities_TV, peak_T, total_T = _vocab_parallel_softmax(logits_TV, tp)
    elsewhere = paddle.full_like(best_T, width * tp.size)
    first_T = tp.minimum(paddle.where(local_peak_T == peak_T, best_T + tp.rank * width, elsewhere))
    return peak_T - at_target_T + paddle.log(total_T), first_T == targets_T, probabilities_TV


def _vocab_parallel_softmax(
    logits_TV: paddle.Tensor, tp: TensorParallel
) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    """Return this rank's columns of the softmax, and per row the largest logit m and the sum of exp(logit - m)."""
    peak_T = tp.maximum(logits_TV.max(-1))
    powers_TV = paddle.exp(logits_TV - peak_T.unsqueeze(1))
    total_T = tp.sum(powers_TV.sum(-1))
    return powers_TV / total_T.unsqueeze(1), peak_T, total_T


def _local_columns(
    targets_T: paddle.Tensor, width: int, tp: TensorParallel
) -> tuple[paddle.Tensor, paddle.Tensor | None]:
    """Return the targets as columns of this rank's vocabulary shard, and which of them are in it (None: all)."""
    if tp.size == 1:
        return targets_T, None
    columns_T = targets_T - tp.rank * width
    is_local_T = (columns_T >= 0) & (columns_T < width)
    return paddle.where(is_local_T, columns_T, paddle.zeros_like(columns_T)), is_local_T


def _zero_nonlocal(values: paddle.Tensor, is_local_T: paddle.Tensor | None) -> paddle.Tensor:
    """Return `values` with the rows set to 0 whose targets are on other ranks."""
    if is_local_T is None:
        return values
    shape = [is_local_T.shape[0], *[1] * (values.ndim - 1)]
    return values * is_local_T.astype(values.dtype).reshape(shape)


def _subtract_one_hot(
    probabilities_TV: paddle.Tensor, targets_T: paddle.Tensor, weights_T: paddle.Tensor | None, tp: TensorParallel
) -> paddle.Tensor:
    """Return weights (P - E), E with 1 at the targets that are in this rank's shard, in the place of P."""
    columns_T, is_local_T = _local_columns(targets_T, probabilities_TV.shape[1], tp)
    if weights_T is None:
        weights_T = paddle.ones(targets_T.shape, probabilities_TV.dtype)
    else:
        probabilities_TV.multiply_(expand_like(weights_T.unsqueeze(1), probabilities_TV))
    flat = probabilities_TV.reshape([-1])
    flat.index_add_(_flat_positions(columns_T, probabilities_TV.shape[1]), 0, _zero_nonlocal(-weights_T, is_local_T))
    return flat.reshape(probabilities_TV.shape)


def _pick(rows_TV: paddle.Tensor, columns_T: paddle.Tensor) -> paddle.Tensor:
    """Return rows[t, columns[t]] for every t."""
    return paddle.gather(rows_TV.reshape([-1]), _flat_positions(columns_T, rows_TV.shape[1]))


def _flat_positions(columns_T: paddle.Tensor, width: int) -> paddle.Tensor:
    return paddle.arange(columns_T.shape[0]) * width + columns_T

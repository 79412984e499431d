"""One optimizer step: forward and backward of micro-batches, one division by the units of the full
step, clip, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor
from paddle.nn import Layer
from paddle.optimizer import Optimizer

from erniekit.model.bf16 import weights_stay
from erniekit.training.collectives import SINGLE_PROCESS, Ranks
from erniekit.training.gradients import LossScale, clip_by_norm, scale_gradients
from erniekit.training.metrics import Totals
from erniekit.training.objectives.forward import Loss, MicroBatchLoss
from erniekit.training.objectives.objective import Objective


class StepResult(NamedTuple):
    totals: Totals
    learning_rate: float
    grad_norm: float  # before clipping
    updated: bool  # False if the step had no units to learn from, or overflowed
    overflowed: bool = False  # a gradient overflowed at the loss scale; the next step has a smaller one


class NotFiniteError(Exception):
    """The loss or the gradient of a step is not finite; the parameters are unchanged.

    Attributes:
        scale: the smallest loss scale, at which the gradient still overflows; None without a loss scale.
    """

    def __init__(self, what: str, micro_batches: Sequence[int], scale: float | None = None) -> None:
        super().__init__(what)
        self.what, self.scale = what, scale
        self.micro_batches = tuple(micro_batches)


def train_step(
    model: Layer,
    parameters: Sequence[Tensor],
    optimizer: Optimizer,
    objective: Objective,
    batches: Sequence[Any],
    *,
    step: int,
    learning_rate: float,
    dropout_scale: float = 1.0,
    max_grad_norm: float = 0.0,
    release_grads: bool = False,
    loss_scale: LossScale | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> StepResult:
    """Make one update from `batches`, the micro-batches of this rank.

    The summed loss is divided once by the units (target tokens) of the whole step, over all micro-batches and ranks, so
    (batch 4, accumulation 1), (1, 4) and one packed row give the same update up to rounding.

    Args:
        parameters: the trainable ones, those of `optimizer`.
        step: finished updates before this one; seeds the random draws together with the micro-batch.
        max_grad_norm: 0 leaves the gradients as they are.
        release_grads: give the memory of the gradients back after the update instead of keeping it for the next step.
        loss_scale: of a float16 run; a gradient that overflows at it skips the update, and the scale is set anew.

    Raises:
        NotFiniteError: before anything was updated.
    """
    counts = [(objective.units(batch), batch.token_count, batch.audio_seconds) for batch in batches]
    units, tokens, audio_seconds = ranks.sum(np.array(counts, np.float64).reshape(-1, 3).sum(0)).tolist()
    read = Totals(tokens=int(tokens), audio_seconds=audio_seconds)
    if units == 0:
        return StepResult(read, learning_rate, 0.0, updated=False)

    loss = objective.loss_for(model, batches, ranks)
    batches = [objective.part_for_loss(batch) for batch in batches]
    scale = 1.0 if loss_scale is None else loss_scale.scale

    def begin_micro_batch(index: int) -> None:
        loss_weight = objective.units(batches[index]) / units * scale
        model.begin_micro_batch(step=step, micro_batch=index, dropout_scale=dropout_scale, loss_weight=loss_weight)

    def zero_grad(set_to_zero: bool = True) -> None:
        if parameters:
            optimizer.clear_grad(set_to_zero=set_to_zero)

    with weights_stay():
        results = ranks.forward_backward(model, loss, batches, begin_micro_batch, units / scale)
    updated = ranks.reduce_gradients(parameters)
    loss_sums, sums, norm = _to_host(results, ranks.global_norm(updated))
    names = sorted(sums)
    wrong = float(not np.isfinite(loss_sums).all())
    over_ranks = ranks.sum(np.array([wrong, loss_sums.sum(), *(sums[name] for name in names)]))
    if over_ranks[0]:
        raise NotFiniteError("the loss", np.flatnonzero(~np.isfinite(loss_sums)).tolist())
    if not math.isfinite(norm):
        if loss_scale is not None and loss_scale.back_off():
            model.end_step(skipped=True)
            zero_grad(set_to_zero=not release_grads)
            return StepResult(read, learning_rate, norm, updated=False, overflowed=True)
        found = _not_finite_gradients(model, loss, batches, begin_micro_batch, parameters, zero_grad, ranks)
        raise NotFiniteError("the gradient norm", found, None if loss_scale is None else scale)
    norm /= scale
    scale_gradients(updated, 1 / scale)
    clip_by_norm(updated, norm, max_grad_norm)
    optimizer.set_lr(learning_rate)
    if parameters:  # a stage of a pipeline may have nothing to update; ranks that share an update all take part in it
        optimizer.step()
    ranks.after_update()
    model.end_step()
    zero_grad(set_to_zero=not release_grads)
    if loss_scale is not None:
        loss_scale.succeed()

    totals = Totals(
        loss_sum=float(over_ranks[1]),
        units=units,
        sums=dict(zip(names, over_ranks[2:].tolist(), strict=True)),
        tokens=read.tokens,
        audio_seconds=read.audio_seconds,
    )
    return StepResult(totals, learning_rate, norm, updated=True)


def _to_host(results: Sequence[MicroBatchLoss], norm: Tensor) -> tuple[np.ndarray, Mapping[str, float], float]:
    """The figures of a step, fetched from the device in one transfer."""
    names = list(results[0].metric_sums)
    scalars = (
        [result.loss_sum for result in results]
        + [result.metric_sums[name] for result in results for name in names]
        + [norm]
    )
    values = paddle.stack([scalar.astype("float64").reshape([]) for scalar in scalars]).numpy()
    count = len(results)
    sums = values[count:-1].reshape(count, len(names)).sum(axis=0)
    return values[:count], dict(zip(names, sums.tolist(), strict=True)), float(values[-1])


def _not_finite_gradients(
    model: Layer,
    loss: Loss,
    batches: Sequence[Any],
    begin_micro_batch: Callable[[int], None],
    parameters: Sequence[Tensor],
    zero_grad: Callable[[], None],
    ranks: Ranks,
) -> list[int]:
    """Which micro-batches of this rank have a gradient that is not finite by itself: each is run again, alone.

    Where ranks share a model no pass can run on one of them only, so all run theirs, in the same order.
    """
    found = []
    for index, batch in enumerate(batches):
        zero_grad()
        ranks.forward_backward(model, loss, [batch], lambda _, index=index: begin_micro_batch(index), 1.0)  # type: ignore[misc]
        if not ranks.all_finite(parameters):
            found.append(index)
    if not ranks.sum(np.array([float(len(found))]))[0]:
        return list(range(len(batches)))  # none alone: their sum overflowed
    return found

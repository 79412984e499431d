"""One optimizer step: micro-batches forward and backward, one division by the units of the whole step, clip, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor
from paddle.nn import Layer
from paddle.optimizer import Optimizer

from erniekit.training.gradients import clip_by_norm, fill_missing_gradients, global_norm
from erniekit.training.objectives import MicroLoss, Objective
from erniekit.training.totals import Totals

SumOverRanks = Callable[[np.ndarray], np.ndarray]


def single_process(values: np.ndarray) -> np.ndarray:
    """The sum over the ranks of a run with one rank."""
    return values


class StepResult(NamedTuple):
    totals: Totals
    learning_rate: float
    grad_norm: float  # before clipping
    updated: bool  # false when the step held no unit to learn from


class NotFiniteError(Exception):
    """The loss or the gradient of a step is not finite; the parameters are as they were before the step."""

    def __init__(self, what: str, micro_batches: Sequence[int]) -> None:
        super().__init__(what)
        self.what = what
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
    sum_over_ranks: SumOverRanks = single_process,
) -> StepResult:
    """Make one update from `batches`, the micro-batches of this rank.

    The summed loss is divided once by the units (target tokens) of the whole step, over all micro-batches and ranks, so
    (batch 4, accumulation 1), (1, 4) and one packed row give the same update up to rounding.

    Args:
        parameters: the trainable ones, those of `optimizer`.
        step: finished updates before this one; seeds the random draws together with the micro-batch.
        max_grad_norm: 0 leaves the gradients as they are.
        release_grads: give the memory of the gradients back after the update instead of keeping it for the next step.

    Raises:
        NotFiniteError: before anything was updated.
    """
    units = float(sum_over_ranks(np.array([sum(objective.units(batch) for batch in batches)], dtype=np.float64))[0])
    tokens = sum(batch.token_count for batch in batches)
    if units == 0:
        return StepResult(Totals(tokens=tokens), learning_rate, 0.0, updated=False)

    loss = objective.loss_for(model, batches)

    def backward(index: int) -> MicroLoss:
        share = objective.units(batches[index]) / units
        model.begin_micro_batch(step=step, micro_batch=index, dropout_scale=dropout_scale, share=share)
        part = loss(model, batches[index])
        (part.loss_sum / units).backward()
        return MicroLoss(part.loss_sum.detach(), {name: value.detach() for name, value in part.sums.items()})

    parts = [backward(index) for index in range(len(batches))]
    fill_missing_gradients(parameters)
    loss_sums, sums, norm = _to_host(parts, global_norm(parameters))
    if not np.isfinite(loss_sums).all():
        raise NotFiniteError("the loss", np.flatnonzero(~np.isfinite(loss_sums)).tolist())
    if not math.isfinite(norm):
        raise NotFiniteError("the gradient norm", _not_finite_gradients(backward, parameters, len(batches)))
    clip_by_norm(parameters, norm, max_grad_norm)
    optimizer.set_lr(learning_rate)
    optimizer.step()
    model.end_step()
    optimizer.clear_grad(set_to_zero=not release_grads)

    over_ranks = sum_over_ranks(np.array([loss_sums.sum(), tokens, *sums.values()], dtype=np.float64))
    totals = Totals(
        loss_sum=float(over_ranks[0]),
        units=units,
        sums=dict(zip(sums, over_ranks[2:].tolist(), strict=True)),
        tokens=int(over_ranks[1]),
    )
    return StepResult(totals, learning_rate, norm, updated=True)


def _to_host(parts: Sequence[MicroLoss], norm: Tensor) -> tuple[np.ndarray, Mapping[str, float], float]:
    """The figures of a step, fetched from the device in one transfer."""
    names = list(parts[0].sums)
    scalars = [part.loss_sum for part in parts] + [part.sums[name] for part in parts for name in names] + [norm]
    values = paddle.stack([scalar.astype("float64").reshape([]) for scalar in scalars]).numpy()
    count = len(parts)
    sums = values[count:-1].reshape(count, len(names)).sum(axis=0)
    return values[:count], dict(zip(names, sums.tolist(), strict=True)), float(values[-1])


def _not_finite_gradients(
    backward: Callable[[int], MicroLoss], parameters: Sequence[Tensor], micro_batches: int
) -> list[int]:
    """Which micro-batches have a gradient that is not finite by itself: each is run again, alone."""
    found = []
    for index in range(micro_batches):
        for parameter in parameters:
            parameter.clear_gradient(set_to_zero=True)
        backward(index)
        if not math.isfinite(float(global_norm(parameters))):
            found.append(index)
    return found or list(range(micro_batches))  # none alone: their sum overflowed

"""Learning-rate schedules and the dropout warm-up, as pure functions of the step.

`step` counts the optimizer updates already made, so the first update uses `learning_rate(0, ...)`: with a warm-up of W
steps that is zero, and the peak is reached at update W + 1. This is the convention of `transformers.get_scheduler`
(tests compare every formula with it). As functions of the step alone, schedules have no state to store: a resumed run
computes the same values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

DecayShape = Literal["linear", "cosine", "1-sqrt"]


@dataclass(frozen=True)
class Schedule:
    """The settings that determine the learning rate of every step."""

    kind: str  # linear | cosine | polynomial | constant | constant_with_warmup | wsd
    peak_lr: float
    total_steps: int
    warmup_steps: int = 0
    min_lr: float = 0.0  # cosine and wsd: the floor
    num_cycles: float = 0.5  # cosine: waves between the warm-up and the end; 0.5 falls once
    lr_end: float = 1e-7  # polynomial: the last value
    power: float = 1.0  # polynomial: the exponent; 1 is a straight line
    decay_steps: int = 0  # wsd: length of the final decay
    decay_shape: DecayShape = "linear"  # wsd: how it falls


def learning_rate(step: int, schedule: Schedule) -> float:
    """Return the learning rate of the update after `step` finished updates."""
    s = schedule
    if s.kind == "constant":
        return s.peak_lr
    if step < s.warmup_steps:
        rising = step / s.warmup_steps
        # The warm-up of wsd starts at its floor, all others start at zero.
        return s.min_lr + (s.peak_lr - s.min_lr) * rising if s.kind == "wsd" else s.peak_lr * rising
    if s.kind == "constant_with_warmup":
        return s.peak_lr
    if s.kind == "wsd":
        return _stable_then_decay(step, s)
    progress = (step - s.warmup_steps) / max(1, s.total_steps - s.warmup_steps)
    if s.kind == "linear":
        return s.peak_lr * max(0.0, 1.0 - progress)
    if s.kind == "cosine":
        return s.min_lr + (s.peak_lr - s.min_lr) * 0.5 * (1.0 + math.cos(2.0 * math.pi * s.num_cycles * progress))
    if s.kind == "polynomial":
        return s.lr_end + (s.peak_lr - s.lr_end) * max(0.0, 1.0 - progress) ** s.power
    raise ValueError(f"unknown schedule {s.kind!r}")


def _stable_then_decay(step: int, s: Schedule) -> float:
    decay_start = s.total_steps - s.decay_steps
    if step < decay_start or s.decay_steps == 0:
        return s.peak_lr
    progress = min(1.0, (step - decay_start) / s.decay_steps)
    remaining = {
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "1-sqrt": 1.0 - math.sqrt(progress),
    }[s.decay_shape]
    return s.min_lr + (s.peak_lr - s.min_lr) * remaining


def dropout_scale(step: int, warmup_steps: int) -> float:
    """Return the factor on dropout probabilities: it rises from 0 to 1 over `warmup_steps` updates and then stays 1."""
    return 1.0 if warmup_steps <= 0 else min(1.0, step / warmup_steps)

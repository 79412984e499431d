"""Learning-rate schedules and the dropout warm-up, as pure functions of the step.

`step` counts the optimizer updates already made, so the first update uses `learning_rate(0, ...)`: with a warm-up of W
steps that is zero, and the peak is reached at update W + 1. This is the convention of `transformers.get_scheduler`
(tests compare every formula with it). As functions of the step alone, schedules have no state to store: a resumed run
computes the same values.
"""

from __future__ import annotations

import math

from erniekit.config.sections.schedule_rules import warmup_length
from erniekit.config.sections.training import TrainingParameters
from erniekit.errors import ConfigurationError

WITHOUT_WARMUP = 10_000  # steps after which `inverse_sqrt` without warm-up is at 1 / sqrt(2) of the peak


def check_schedule_fits(section: TrainingParameters, total_steps: int) -> None:
    """Check the schedule against the length of the run, which may only be known once the data has been read.

    Raises:
        ConfigurationError: warm-up and decay together take more than `total_steps`.
    """
    warmup = warmup_steps_of(section, total_steps)
    if section.lr_scheduler_type == "wsd" and warmup + section.decay_steps > total_steps:
        raise ConfigurationError(
            f"warmup_steps {warmup} + decay_steps {section.decay_steps} exceed the {total_steps} steps "
            "of this run\n  Shorten one of them, or train longer (num_train_epochs, max_steps)."
        )


def warmup_steps_of(section: TrainingParameters, total_steps: int) -> int:
    """Return the optimizer steps of the warm-up, from `warmup_steps` or `warmup_ratio`."""
    return warmup_length(section.warmup_steps, section.warmup_ratio, total_steps)


def learning_rate(step: int, section: TrainingParameters, total_steps: int) -> float:
    """Return the learning rate of the update that follows `step` finished updates.

    Raises:
        ValueError: `lr_scheduler_type` is unknown.
    """
    kind, peak = section.lr_scheduler_type, section.learning_rate
    if kind == "constant":
        return peak
    warmup = warmup_steps_of(section, total_steps)
    if step < warmup:
        rising = step / warmup
        # The warm-up of wsd starts at its floor, all others start at zero.
        return section.min_lr + (peak - section.min_lr) * rising if kind == "wsd" else peak * rising
    if kind == "constant_with_warmup":
        return peak
    if kind == "wsd":
        return _stable_then_decay(step, section, total_steps)
    if kind == "inverse_sqrt":
        scale = warmup or WITHOUT_WARMUP
        return peak / math.sqrt((step + scale - warmup) / scale)
    progress = (step - warmup) / max(1, total_steps - warmup)
    if kind == "linear":
        return peak * max(0.0, 1.0 - progress)
    if kind == "cosine":
        angle = 2.0 * math.pi * section.num_cycles * progress
        return section.min_lr + (peak - section.min_lr) * 0.5 * (1.0 + math.cos(angle))
    if kind == "polynomial":
        return section.lr_end + (peak - section.lr_end) * max(0.0, 1.0 - progress) ** section.power
    raise ValueError(f"unknown schedule {kind!r}")


def _stable_then_decay(step: int, section: TrainingParameters, total_steps: int) -> float:
    decay_start = total_steps - section.decay_steps
    if step < decay_start or section.decay_steps == 0:
        return section.learning_rate
    progress = min(1.0, (step - decay_start) / section.decay_steps)
    remaining = {
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "1-sqrt": 1.0 - math.sqrt(progress),
    }[section.wsd_decay_type]
    return section.min_lr + (section.learning_rate - section.min_lr) * remaining


def dropout_scale(step: int, warmup_steps: int) -> float:
    """Return the factor on the dropout probabilities, which rises from 0 to 1 over `warmup_steps` updates."""
    return 1.0 if warmup_steps <= 0 else min(1.0, step / warmup_steps)

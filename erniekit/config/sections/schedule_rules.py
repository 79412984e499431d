"""Rules of the learning rate, its warm-up and its decay; the parameters are declared in `training.py`."""

from __future__ import annotations

import math

from erniekit.config.parameter import ConfigBuilder, rule
from erniekit.config.values import format_value


def warmup_length(warmup_steps: int, warmup_ratio: float, total_steps: int) -> int:
    """Return the optimizer steps of the warm-up of a run of `total_steps`, as transformers computes them."""
    return warmup_steps or math.ceil(warmup_ratio * total_steps)


@rule("warmup_steps", "warmup_ratio", verbs=("train",))
def warmup_is_given_once(builder: ConfigBuilder) -> None:
    """`warmup_ratio` has no effect beside `warmup_steps` above 0."""
    if builder.differs("warmup_ratio") and builder["warmup_steps"]:
        builder.no_effect("warmup_ratio", f"because warmup_steps is {builder['warmup_steps']}, which takes precedence")


@rule("lr_scheduler_type", "decay_steps", "warmup_steps", "warmup_ratio", "max_steps")
def schedule_fits_the_run(builder: ConfigBuilder) -> None:
    """The `wsd` schedule needs `decay_steps`; warm-up and decay together must fit into `max_steps`."""
    decay = builder["decay_steps"] if builder["lr_scheduler_type"] == "wsd" else 0
    if builder["lr_scheduler_type"] == "wsd" and not decay:
        builder.problem("lr_scheduler_type", "`wsd` needs the length of its decay", "set `decay_steps` to at least 1")
    warmup = warmup_length(builder["warmup_steps"], builder["warmup_ratio"], builder["max_steps"])
    if builder["max_steps"] > 0 and decay and warmup + decay > builder["max_steps"]:
        what = f"warmup_steps + decay_steps = {warmup + decay} exceed max_steps = {builder['max_steps']}"
        builder.problem("decay_steps", what, "shorten one of them")


@rule("lr_scheduler_type", "warmup_steps", "max_steps")
def warmup_ends_within_the_run(builder: ConfigBuilder) -> None:
    """Where warm-up takes all of `max_steps` or more, a message says that `learning_rate` is never reached."""
    warms_up = builder["lr_scheduler_type"] != "constant"
    if warms_up and 0 < builder["max_steps"] <= builder["warmup_steps"]:
        builder.messages.append(peak_lr_not_reached(builder["warmup_steps"], builder["max_steps"]))


def peak_lr_not_reached(warmup_steps: int, total_steps: int) -> str:
    """Return the message for a run that ends before its warm-up; update k of a warm-up of W has rate (k - 1) / W."""
    return (
        f"warmup_steps {warmup_steps:,} takes all of the {total_steps:,} steps, so learning_rate is never reached: "
        f"the last step has {(total_steps - 1) / warmup_steps:.0%} of it"
    )


@rule("min_lr", "learning_rate", "lr_scheduler_type")
def minimum_below_the_peak(builder: ConfigBuilder) -> None:
    """`min_lr` may not exceed `learning_rate`."""
    if builder["lr_scheduler_type"] in ("cosine", "wsd") and builder["min_lr"] > builder["learning_rate"]:
        builder.problem(
            "min_lr", f"{builder['min_lr']} exceeds learning_rate {builder['learning_rate']}", "write a smaller value"
        )


@rule("learning_rate", verbs=("train",))
def a_learning_rate_moves_weights(builder: ConfigBuilder) -> None:
    """A `learning_rate` above 1 is told: AdamW moves every weight by about as much in each step."""
    rate = builder["learning_rate"]
    if rate > 1:
        builder.messages.append(
            f"learning_rate is {format_value(rate)}: AdamW moves every weight by about as much in each step, and usual "
            "rates are 1e-6 to 1e-3; is the exponent missing?"
        )


@rule("lr_end", "learning_rate", "lr_scheduler_type")
def polynomial_end_below_the_peak(builder: ConfigBuilder) -> None:
    """`lr_end` may not exceed `learning_rate` in the polynomial schedule."""
    if builder["lr_scheduler_type"] == "polynomial" and builder["lr_end"] > builder["learning_rate"]:
        builder.problem(
            "lr_end", f"{builder['lr_end']} exceeds learning_rate {builder['learning_rate']}", "write a smaller value"
        )


SCHEDULE_RULES = (
    warmup_is_given_once,
    schedule_fits_the_run,
    warmup_ends_within_the_run,
    minimum_below_the_peak,
    a_learning_rate_moves_weights,
    polynomial_end_below_the_peak,
)

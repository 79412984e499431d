"""What a user chooses while a run trains, and what the run answers: learning rate, loss scale, commands for later.

All of it is part of `TrainerState`, so a run that resumes has it, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from erniekit.config.sections.training import TrainingParameters
from erniekit.training.callbacks.console import duration
from erniekit.training.checkpoint.state import TrainerState
from erniekit.training.control import Command
from erniekit.training.gradients import LossScale
from erniekit.training.optim.schedules import learning_rate


def refusal(command: Command, state: TrainerState, total_steps: int) -> str:
    """Return why a run in this state cannot do what a command says, now or later; "" if it can."""
    if command.name == "loss_scale" and (problem := loss_scale_problem(command, state.loss_scale)):
        return problem
    if command.step is not None and not state.step < command.step <= total_steps:
        return f"{command}: write a step from {state.step + 1} to {total_steps}"
    return ""


def choose(command: Command, state: TrainerState, total_steps: int, section: TrainingParameters) -> str:
    """Change the state as a command says that concerns nothing else, and return the answer."""
    following = f"{command.name}: step {state.step + 1} has a"
    if command.step is not None:
        state.events.append(command)
        return f"{command}: noted"
    if command.name == "lr":
        state.learning_rate = command.value
        origin = "the schedule's" if command.value is None else "until `lr schedule`"
        return f"{following} learning rate of {next_learning_rate(state, total_steps, section):g}, {origin}"
    if command.name == "loss_scale":
        scale = state.loss_scale
        assert scale is not None and command.value is not None
        scale.scale, scale.finite_steps, scale.overflows_at_floor = command.value, 0, 0
        return f"{following} loss scale of {scale.scale:,.15g}"
    if command.name == "time":
        return time_line(state, total_steps, None if command.value is None else int(command.value))
    answer = describe_events(state.events)
    if command.name == "events clear":
        state.events.clear()
        return f"{answer}: forgotten"
    assert command.name == "events", command
    return answer


def next_learning_rate(state: TrainerState, total_steps: int, section: TrainingParameters) -> float:
    """Return the learning rate of the next step: the user's, or the schedule's."""
    chosen = state.learning_rate
    return learning_rate(state.step, section, total_steps) if chosen is None else chosen


def take_events(events: list[Command], step: int) -> list[Command]:
    """Remove the commands that are due after so many steps, and return them in the order in which they happen.

    Those that save come last: what they save then holds what the others have changed, and none of them a second time.
    """
    due = [event for event in events if event.step is not None and event.step <= step]
    events[:] = [event for event in events if event not in due]
    return sorted((event._replace(step=None) for event in due), key=lambda event: event.name in ("save", "quit"))


def describe_events(events: Sequence[Command]) -> str:
    """Return the answer to `events`."""
    in_order = sorted(events, key=lambda event: event.step or 0)
    return "events: " + (", ".join(map(str, in_order)) or "none")


def loss_scale_problem(command: Command, scale: LossScale | None) -> str:
    """Return why a run with this loss scale cannot have the one that the command wants; "" if it can."""
    if scale is None:
        return f"{command}: this run has no loss scale; it needs fp16: true and a GPU"
    if command.value is None or not scale.floor <= command.value <= scale.ceiling:
        bounds = f"{scale.floor:,.15g} (min_loss_scale) to {scale.ceiling:,.15g} (max_loss_scale)"
        return f"{command}: expected a number from {bounds}"
    return ""


def status_line(
    state: TrainerState, total_steps: int, learning_rate: float, saved_step: int, writing: bool = False
) -> str:
    """Return the answer to `status`.

    Args:
        saved_step: -1 if nothing is saved.
        writing: the checkpoint of `saved_step` is still being written.
    """
    totals = state.whole_run
    loss = f", mean loss {totals.loss:.4f}" if totals.units else ""
    saved = (
        f"step {saved_step:,} is {'being written' if writing else 'saved'}" if saved_step >= 0 else "nothing is saved"
    )
    return (
        f"status: {state.step:,} of {total_steps:,} steps, epoch {state.epoch:.2f}{loss}, learning rate "
        f"{learning_rate:g}, {totals.tokens_per_second:,.0f} tokens/s; {saved}"
    )


def time_line(state: TrainerState, total_steps: int, target: int | None = None) -> str:
    """Return the answer to `time`: steps without evaluations and checkpoints, at the run's mean speed.

    Args:
        target: a number of finished steps; None: those of the run.
    """
    target = total_steps if target is None else target
    if not state.step or not state.whole_run.seconds:
        return "time: no step is made yet"
    if target <= state.step:
        return f"time: step {target:,} is made already; this is after step {state.step:,}"
    per_step = state.whole_run.seconds / state.step
    what = "the last step" if target == total_steps else f"step {target:,}"
    return (
        f"time: {state.step:,} steps took {duration(state.whole_run.seconds)}, {per_step:.3g} s each; {what} is made "
        f"in {duration(per_step * (target - state.step))}, evaluations and checkpoints not counted"
    )

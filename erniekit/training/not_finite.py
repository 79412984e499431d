"""Describe a loss or a gradient that is not finite: the step, the samples, and the checkpoint to resume from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from erniekit.errors import TrainingError
from erniekit.training.checkpoint.state import TrainerState
from erniekit.training.step import NotFiniteError

SHOWN = 20  # samples of a micro-batch


def describe_micro_batches(error: NotFiniteError, batches: Sequence[Any], describe: Callable[[int], str]) -> list[str]:
    """Return a line for each micro-batch of this rank that the error names.

    Args:
        batches: of the step.
        describe: index of a sample -> "file.jsonl:17".
    """
    lines = []
    for index in error.micro_batches:
        samples = [describe(sample) for row in batches[index].samples for sample in row]
        more = f" and {len(samples) - SHOWN} more" if len(samples) > SHOWN else ""
        lines.append(f"micro-batch {index}: {', '.join(samples[:SHOWN])}{more}")
    return lines


def not_finite_error(
    state: TrainerState, error: NotFiniteError, of_ranks: Sequence[Sequence[str]], newest: Path | None, unsaved: str
) -> TrainingError:
    """Build the error that ends the run.

    Args:
        of_ranks: `describe_micro_batches` of every rank.
        newest: the last complete checkpoint.
        unsaved: why a later one could not be written, if so.
    """
    at_scale = "" if error.scale is None else f" even at the loss scale {error.scale:g}, the smallest"
    lines = [f"step {state.step + 1}: {error.what} is not finite{at_scale}; the model was not updated with it."]
    for rank, found in enumerate(of_ranks):
        lines += [f"  rank {rank}, {line}" if len(of_ranks) > 1 else f"  {line}" for line in found]
    if state.loss_scale is not None:
        lines.append("  float16 may be too narrow for this model: `bf16: true` has the range of float32.")
    if unsaved:
        lines.append(f"  {unsaved}")
    if newest is None:
        lines.append("  No checkpoint was saved. A lower learning_rate, warmup_steps or max_grad_norm may help.")
    else:
        lines.append(
            f"  The last good checkpoint is {newest}: resume from it with a lower learning_rate, more warmup_steps "
            "or a lower max_grad_norm, or start from its weights without these samples (init_from_checkpoint)."
        )
    return TrainingError("\n".join(lines))

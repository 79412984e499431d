"""A trained model as a program of Paddle's inference engine, checked against the model that it was made from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from erniekit.errors import ModelFileError
from erniekit.model.decoder import Decoder
from erniekit.model.static_inference import ProgramDescription, Step, open_program, prefill, save_program
from erniekit.runners.logit_difference import LogitDifference, compare

TOLERANCE = 1e-3  # of the largest logit; a program that rounds differently stays far below


def write_program(
    decoder: Decoder, folder: Path, prompts: Sequence[Sequence[int]], expected: Sequence[np.ndarray]
) -> LogitDifference:
    """Save the program and run it from its files.

    Args:
        expected: the trained model's logits after every token of each prompt.

    Raises:
        ModelFileError: the program computes something else.
    """
    save_program(decoder, folder)
    return check_program(open_program(folder), ProgramDescription.read(folder), prompts, expected)


def check_program(
    step: Step, description: ProgramDescription, prompts: Sequence[Sequence[int]], expected: Sequence[np.ndarray]
) -> LogitDifference:
    """Compare a program's logits with those of the trained model: a batch of prompts, and a prompt token by token.

    Raises:
        ModelFileError: they differ by more than rounding explains.
    """
    last = prefill(step, description, prompts)[0]
    pairs = [(logits[-1:], row[None]) for logits, row in zip(expected, last, strict=True)]
    prompt, logits = max(zip(prompts, expected, strict=True), key=lambda pair: len(pair[0]))
    pairs.append((logits[: len(prompt)], np.concatenate(list(_token_by_token(step, description, prompt)))))
    difference = compare([theirs for theirs, _ in pairs], [ours for _, ours in pairs])
    if difference.largest > TOLERANCE * max(1.0, difference.largest_logit) or not np.isfinite(difference.largest):
        raise ModelFileError(
            f"the saved program does not compute what the model computes: {difference}.\n"
            "  Nothing was exported. This is a defect of the exporter or of the engine; please report it."
        )
    return difference


def _token_by_token(step: Step, description: ProgramDescription, prompt: Sequence[int]) -> Iterator[np.ndarray]:
    """The logits [1, V] after each token of a prompt, fed one at a time."""
    past = description.empty_past(1)
    zero = np.zeros(1, np.int64)
    for position, token in enumerate(prompt):
        ids, positions = np.array([[token]], np.int64), np.array([[position]], np.int64)
        logits, *past = step([ids, positions, np.ones((1, position + 1), np.int64), zero, *past])
        yield logits

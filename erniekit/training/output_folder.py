"""Where a run starts: what its output folder holds, and which checkpoint it continues from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from erniekit.errors import CheckpointError
from erniekit.training.checkpoint_folder import (
    checkpoint_folders,
    holds_files,
    locked,
    newest_complete,
    problems,
    remove_files,
    remove_folder,
    remove_leftovers,
    step_of,
)


@dataclass(frozen=True)
class Start:
    """What the run continues from."""

    checkpoint: Path | None  # weights, optimizer and step come from here; None: a fresh run
    superseded: tuple[Path, ...] = ()  # checkpoints of another run, which go when this one begins to train
    supersedes_model: bool = False  # so does its finished model


@contextmanager
def open_output_folder(
    output_dir: Path,
    *,
    resume_from_checkpoint: str | bool | None,
    overwrite_output_dir: bool,
    weights_from: Path | None = None,
    say: Callable[[str], None] = print,
) -> Iterator[Start]:
    """Lock `output_dir` for this run, clear what a killed run left half-written, and find where to start.

    Args:
        resume_from_checkpoint: a checkpoint folder, or true for the newest complete one in `output_dir`.
        overwrite_output_dir: allow checkpoints of other runs in `output_dir` to be removed.
        weights_from: the folder of the weights that a fresh run starts from; refused if this run would remove it.

    Raises:
        CheckpointError: another run writes there, the checkpoint is incomplete, or starting would overwrite others.
    """
    with locked(output_dir):
        for leftover in remove_leftovers(output_dir):
            say(f"removed {leftover}: left half-written by a run that was killed")
        yield _find_start(output_dir, resume_from_checkpoint, overwrite_output_dir, weights_from, say)


def remove_superseded(output_dir: Path, start: Start, say: Callable[[str], None] = print) -> None:
    """Remove what overwrite_output_dir allows to be removed. Called late, when nothing else can be refused any more."""
    for folder in start.superseded:
        say(f"overwrite_output_dir: removing {folder}")
        remove_folder(folder)
    if start.supersedes_model:
        say(f"overwrite_output_dir: removing the earlier model in {output_dir}")
        remove_files(output_dir)


def _find_start(
    output_dir: Path,
    resume: str | bool | None,
    overwrite: bool,
    weights_from: Path | None,
    say: Callable[[str], None],
) -> Start:
    if resume is True:
        newest, skipped = newest_complete(output_dir)
        for line in skipped:
            say(line)
        if newest is not None:
            say(f"resuming from {newest}")
            return Start(newest)
        say(f"resume_from_checkpoint: true, but {output_dir} holds no complete checkpoint: starting afresh")
    elif resume:
        return _start_from(Path(resume), output_dir, overwrite, say)
    return _start_afresh(output_dir, overwrite, weights_from)


def _start_from(checkpoint: Path, output_dir: Path, overwrite: bool, say: Callable[[str], None]) -> Start:
    _require_complete(checkpoint)
    same_run = checkpoint.resolve().parent == output_dir.resolve()
    present = checkpoint_folders(output_dir)
    others = [folder for folder in present if not same_run or step_of(folder) > step_of(checkpoint)]
    if others and not overwrite:
        raise CheckpointError(
            f"{output_dir} holds checkpoints that do not lead to {checkpoint}: {_names(others)}.\n"
            "  Set overwrite_output_dir: true to have them removed, or choose another output_dir."
        )
    say(f"resuming from {checkpoint}")
    return Start(checkpoint, tuple(others))


def _start_afresh(output_dir: Path, overwrite: bool, weights_from: Path | None) -> Start:
    present, model = checkpoint_folders(output_dir), holds_files(output_dir)
    if (present or model) and not overwrite:
        held = f"checkpoints: {_names(present)}" if present else "a trained model"
        complete = any(not problems(folder, hashes=False) for folder in present)
        resume = "resume_from_checkpoint: true to continue that run, " if complete else ""
        raise CheckpointError(
            f"{output_dir} already holds {held}.\n"
            f"  Set {resume}overwrite_output_dir: true to have it removed, or choose another output_dir."
        )
    goes = [folder.resolve() for folder in present] + ([output_dir.resolve()] if model else [])
    if weights_from is not None and weights_from.resolve() in goes:
        raise CheckpointError(
            f"the run starts from the weights in {weights_from}, which overwrite_output_dir: true would remove.\n"
            "  Choose another output_dir."
        )
    return Start(None, tuple(present), model)


def _require_complete(checkpoint: Path) -> None:
    if not checkpoint.is_dir():
        raise CheckpointError(f"resume_from_checkpoint: there is no folder {checkpoint}")
    if step_of(checkpoint) < 0:
        inside = _names(checkpoint_folders(checkpoint))
        hint = f" It holds {inside}." if inside else ""
        raise CheckpointError(f"resume_from_checkpoint: {checkpoint} is not a checkpoint-<step> folder.{hint}")
    found = problems(checkpoint, hashes=True)
    if found:
        raise CheckpointError(f"resume_from_checkpoint: {checkpoint} is not complete: {'; '.join(found[:5])}")


def _names(folders: list[Path]) -> str:
    return ", ".join(folder.name for folder in folders[:4]) + (", ..." if len(folders) > 4 else "")

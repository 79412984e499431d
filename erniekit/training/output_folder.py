"""Where a run starts: what its output folder holds, and which checkpoint it continues from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from erniekit.errors import CheckpointError
from erniekit.training.checkpoint_folder import (
    checkpoint_folders,
    locked,
    newest_complete,
    problems,
    remove_leftovers,
    step_of,
)


@dataclass(frozen=True)
class Start:
    """What the run continues from."""

    checkpoint: Path | None  # weights, optimizer and step come from here; None: a fresh run
    superseded: tuple[Path, ...] = ()  # checkpoints of another run, which go when this one begins to train


@contextmanager
def open_output_folder(
    output_dir: Path,
    *,
    resume_from_checkpoint: str | bool | None,
    overwrite_output_dir: bool,
    init_from_checkpoint: str | None = None,
    say: Callable[[str], None] = print,
) -> Iterator[Start]:
    """Lock `output_dir` for this run, clear what a killed run left half-written, and find where to start.

    Args:
        resume_from_checkpoint: a checkpoint folder, or true for the newest complete one in `output_dir`.
        overwrite_output_dir: allow checkpoints of other runs in `output_dir` to be removed.
        init_from_checkpoint: where the caller takes its first weights from; only checked here.

    Raises:
        CheckpointError: another run writes there, the checkpoint is incomplete, or starting would overwrite others.
    """
    with locked(output_dir):
        for leftover in remove_leftovers(output_dir):
            say(f"removed {leftover}: left half-written by a run that was killed")
        yield _find_start(output_dir, resume_from_checkpoint, overwrite_output_dir, init_from_checkpoint, say)


def _find_start(
    output_dir: Path,
    resume: str | bool | None,
    overwrite: bool,
    init_from: str | None,
    say: Callable[[str], None],
) -> Start:
    present = checkpoint_folders(output_dir)
    if resume is True:
        newest, skipped = newest_complete(output_dir)
        for line in skipped:
            say(line)
        if newest is None:
            say(f"resume_from_checkpoint: true, but {output_dir} holds no complete checkpoint: starting afresh")
        else:
            say(f"resuming from {newest}")
        return Start(newest)
    if resume:
        checkpoint = Path(resume)
        _require_complete(checkpoint)
        same_run = checkpoint.resolve().parent == output_dir.resolve()
        others = [folder for folder in present if not same_run or step_of(folder) > step_of(checkpoint)]
        if others and not overwrite:
            raise CheckpointError(
                f"{output_dir} holds checkpoints that do not lead to {checkpoint}: {_names(others)}.\n"
                "  Set overwrite_output_dir: true to have them removed, or choose another output_dir."
            )
        say(f"resuming from {checkpoint}")
        return Start(checkpoint, tuple(others))
    if present and not overwrite:
        raise CheckpointError(
            f"{output_dir} already holds checkpoints: {_names(present)}.\n"
            "  Set resume_from_checkpoint: true to continue that run, overwrite_output_dir: true to have it removed, "
            "or choose another output_dir."
        )
    if init_from and any(folder.resolve() == Path(init_from).resolve() for folder in present):
        raise CheckpointError(
            f"init_from_checkpoint: {init_from} is one of the checkpoints that overwrite_output_dir: true removes.\n"
            "  Choose another output_dir."
        )
    return Start(None, tuple(present))


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

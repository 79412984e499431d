"""Where a run starts: what its output folder holds, and which checkpoint it continues from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from erniekit.errors import CheckpointError
from erniekit.model.storage.model_folder import MANIFEST, refuse_half_written
from erniekit.training.callbacks.loss_curve import LOSS_CURVE_FILE
from erniekit.training.callbacks.results import RESULT_FILES
from erniekit.training.checkpoint_folder import (
    checkpoint_folders,
    holds_foreign_model,
    holds_model,
    newest_complete,
    problems,
    refuse_damaged,
    remove_folder,
    remove_leftovers,
    remove_model,
    step_of,
)
from erniekit.training.folder_lock import locked
from erniekit.training.manifest import unknown_format
from erniekit.training.staging import remove_abandoned


@dataclass(frozen=True)
class Start:
    """What the run continues from."""

    checkpoint: Path | None  # weights, optimizer and step come from here; None: a fresh run
    superseded: tuple[Path, ...] = ()  # checkpoints of another run, which go when this one begins to train
    supersedes_model: bool = False  # so does a model that is none of this run

    @classmethod
    def broadcast(cls, found: Start | None, all_gather_object: Callable[[str], list[str]]) -> Start:
        """What the first of several ranks has found, on all of them; it alone removes what is superseded."""
        checkpoint = all_gather_object(str(found.checkpoint or "") if found else "")[0]
        return found or cls(Path(checkpoint) if checkpoint else None)


@contextmanager
def open_output_folder(
    output_dir: Path,
    *,
    resume_from_checkpoint: str | bool | None,
    overwrite_output_dir: bool,
    model_folder: Path | None = None,
    weights_from: Path | None = None,
    say: Callable[[str], None] = print,
) -> Iterator[Start]:
    """Lock `output_dir` for this run, clear what a killed run left half-written, and find where to start.

    Args:
        resume_from_checkpoint: a checkpoint folder, or true for the newest complete one in `output_dir`.
        overwrite_output_dir: allow checkpoints and models of others in `output_dir` to be removed.
        model_folder: where configuration and tokenizer come from.
        weights_from: where the weights of a fresh run come from.
            Neither may be `output_dir` or a checkpoint in it, which this run overwrites or removes.

    Raises:
        CheckpointError: another run writes there, the checkpoint is incomplete, or starting would overwrite others.
        ModelFileError: a folder to read from was left half-written.
    """
    with locked(output_dir, say):
        for source in (model_folder, weights_from):
            if source is not None:
                _refuse_inside(source, output_dir)
                refuse_half_written(source)
        for leftover in remove_leftovers(output_dir):
            say(f"removed {leftover}: left half-written by a run that was killed")
        remove_abandoned(say)
        yield _find_start(output_dir, resume_from_checkpoint, overwrite_output_dir, weights_from, say)


def remove_superseded(output_dir: Path, start: Start, say: Callable[[str], None] = print) -> None:
    """Remove what overwrite_output_dir allows to be removed, and the results of a run that ends with it.

    Called late, when nothing else can be refused any more.
    """
    for folder in start.superseded:
        say(f"overwrite_output_dir: removing {folder}")
        remove_folder(folder)
    if start.supersedes_model:
        say(f"overwrite_output_dir: removing the earlier model in {output_dir}")
        remove_model(output_dir)
    if start.checkpoint is None and (start.superseded or start.supersedes_model):
        for name in (*RESULT_FILES, LOSS_CURVE_FILE):  # the log begins anew with the run
            (output_dir / name).unlink(missing_ok=True)


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
            return _resume(newest, (), output_dir, overwrite, say)
    elif resume:
        return _start_from(Path(resume).expanduser(), output_dir, overwrite, say)
    start = _start_afresh(output_dir, overwrite, weights_from)
    if resume:
        say(f"resume_from_checkpoint: true, but {output_dir} holds no complete checkpoint: starting afresh")
    return start


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
    return _resume(checkpoint, tuple(others), output_dir, overwrite, say)


def _resume(
    checkpoint: Path, others: tuple[Path, ...], output_dir: Path, overwrite: bool, say: Callable[[str], None]
) -> Start:
    """A model that an earlier, shorter or interrupted part of this run has published is the run's own to replace."""
    same_run = checkpoint.resolve().parent == output_dir.resolve()
    foreign = holds_foreign_model(output_dir) if same_run else bool(holds_model(output_dir))
    if foreign and not overwrite:
        raise CheckpointError(
            f"{output_dir} holds {holds_model(output_dir)}, which is not of the run that {checkpoint} belongs to.\n"
            "  Set overwrite_output_dir: true to have it removed, or choose another output_dir."
        )
    say(f"resuming from {checkpoint}")
    return Start(checkpoint, others, foreign)


def _start_afresh(output_dir: Path, overwrite: bool, weights_from: Path | None) -> Start:
    present, model = checkpoint_folders(output_dir), holds_model(output_dir)
    if (present or model) and not overwrite:
        held = f"checkpoints: {_names(present)}" if present else model
        complete = any(not problems(folder, hashes=False) for folder in present)
        resume = "resume_from_checkpoint: true to continue that run, " if complete else ""
        raise CheckpointError(
            f"{output_dir} already holds {held}.\n"
            f"  Set {resume}overwrite_output_dir: true to have it removed, or choose another output_dir."
        )
    if weights_from is not None:
        refuse_damaged(weights_from)
    return Start(None, tuple(present), bool(model))


def _refuse_inside(source: Path, output_dir: Path) -> None:
    if source.resolve() in {folder.resolve() for folder in (output_dir, *checkpoint_folders(output_dir))}:
        raise CheckpointError(
            f"the run reads its model from {source}, which writing to output_dir {output_dir} would overwrite "
            "or remove.\n  Choose another output_dir."
        )


def _require_complete(checkpoint: Path) -> None:
    if not checkpoint.is_dir():
        raise CheckpointError(f"resume_from_checkpoint: there is no folder {checkpoint}")
    if step_of(checkpoint) < 0:
        inside = _names(checkpoint_folders(checkpoint))
        hint = f" It holds {inside}." if inside else ""
        raise CheckpointError(f"resume_from_checkpoint: {checkpoint} is not a checkpoint-<step> folder.{hint}")
    found = problems(checkpoint, hashes=True)
    if found:
        what = "cannot be resumed from" if unknown_format(checkpoint / MANIFEST) else "is not complete"
        raise CheckpointError(f"resume_from_checkpoint: {checkpoint} {what}: {'; '.join(found[:5])}")


def _names(folders: list[Path]) -> str:
    return ", ".join(folder.name for folder in folders[:4]) + (", ..." if len(folders) > 4 else "")

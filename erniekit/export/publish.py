"""Putting a finished model folder where the user wants it: nothing is lost, and it is complete or not there.

Needs no Paddle.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from erniekit.errors import ConfigurationError
from erniekit.model.storage.model_folder import refuse_half_written
from erniekit.training.checkpoint.atomic_folder import (
    holds_foreign_model,
    publish_files,
    remove_model,
    write_folder,
)


def check_target(target: Path, sources: Iterable[Path], *, overwrite: bool) -> None:
    """Raise ConfigurationError where writing `target` would touch what is read, or something that is there already.

    Args:
        sources: the folders that are read while `target` is written.
        overwrite: allow a folder that is not empty; its files with the names that are written are replaced.
    """
    for source in sources:
        if target.resolve() in (source.resolve(), *source.resolve().parents):
            raise ConfigurationError(
                f"--output {target}: this is {'the' if target.samefile(source) else 'around the'} folder that is read"
                f" ({source}), which writing would change.\n  Name another folder."
            )
    if target.exists() and not target.is_dir():
        raise ConfigurationError(f"--output {target}: is a file; name a folder")
    held = sorted(path.name for path in target.iterdir()) if target.is_dir() else []
    if held and not overwrite:
        shown = ", ".join(held[:3]) + (", ..." if len(held) > 3 else "")
        raise ConfigurationError(
            f"--output {target}: the folder is not empty ({shown}), and nothing is overwritten unasked.\n"
            "  Name another folder, or add overwrite_output_dir=true to this command."
        )


def publish(target: Path, write: Callable[[Path], None]) -> None:
    """Create the folder `target` with what `write(folder)` puts into it, and a manifest; all or nothing.

    In a folder that is not empty a model that is there is replaced, and files of other names stay.

    Raises:
        CheckpointError: the disk is full or cannot be written; what was there is as it was.
    """
    occupied = target.is_dir() and any(target.iterdir())

    def write_or_clear(temp_path: Path) -> None:
        with ExitStack() as undo:  # after a refusal or a signal: half of a folder is of no use to anybody
            undo.callback(shutil.rmtree, temp_path, ignore_errors=True)
            write(temp_path)
            undo.pop_all()
        if occupied and holds_foreign_model(target):
            remove_model(target)

    if occupied:
        publish_files(target, write_or_clear)
    else:
        write_folder(target.absolute(), write_or_clear)


def check_model_folder(folder: Path) -> None:
    """Raise ModelFileError or ConfigurationError where `folder` is no folder, or was left half-written."""
    if not folder.is_dir():
        what = "is a file, and a model folder is needed" if folder.exists() else "there is no such folder"
        raise ConfigurationError(f"{folder}: {what}")
    refuse_half_written(folder)

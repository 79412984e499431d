"""Write a model folder completely or not at all, and never overwrite other files unasked. Needs no Paddle."""

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
    """Raise ConfigurationError if writing `target` would change a folder that is read or overwrite existing files.

    Args:
        sources: folders that are read while `target` is written.
        overwrite: allow a folder that is not empty; files with the same names are replaced.
    """
    for source in sources:
        if target.resolve() in (source.resolve(), *source.resolve().parents):
            raise ConfigurationError(
                f"--output {target}: this is {'the' if target.samefile(source) else 'around the'} folder that "
                f"this command reads ({source}) and must not change.\n  Name another folder."
            )
    if target.exists() and not target.is_dir():
        raise ConfigurationError(f"--output {target}: is a file; name a folder")
    held = sorted(path.name for path in target.iterdir()) if target.is_dir() else []
    if held and not overwrite:
        shown = ", ".join(held[:3]) + (", ..." if len(held) > 3 else "")
        raise ConfigurationError(
            f"--output {target}: the folder is not empty ({shown}), and export never overwrites files unasked.\n"
            "  Name another folder, or add overwrite_output_dir=true to this command."
        )


def publish(target: Path, write: Callable[[Path], None]) -> None:
    """Create the folder `target` from what `write(folder)` puts into it, with a manifest; all or nothing.

    If the folder is not empty, a model in it is replaced, and files with other names stay.

    Raises:
        CheckpointError: the disk is full or cannot be written; `target` is unchanged.
    """
    occupied = target.is_dir() and any(target.iterdir())

    def write_or_clear(temp_path: Path) -> None:
        with ExitStack() as undo:  # after an error or a signal, half a folder is useless
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
    """Raise ModelFileError or ConfigurationError if `folder` does not exist, is a file, or was left half-written."""
    if not folder.is_dir():
        what = "is a file; name a model folder" if folder.exists() else "there is no such folder"
        raise ConfigurationError(f"{folder}: {what}")
    refuse_half_written(folder)

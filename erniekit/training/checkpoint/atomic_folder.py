"""Folders that are complete or absent: written under a temporary name, synced, given a manifest, and renamed last.

A checkpoint folder `checkpoint-{step}` counts only with a manifest that lists every file with its size and SHA-256.
Names that start with `.writing-` and `.deleting-` are work in progress of the run that holds the lock; without such a
run, a killed run has left them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from erniekit.errors import CheckpointError
from erniekit.manifest import MANIFEST, Files, problems, read_manifest, unknown_format
from erniekit.model.storage.model_folder import PUBLISHING, is_half_written
from erniekit.training.checkpoint.manifest import seal, sync, write_manifest

_WRITING, _DELETING = ".writing-", ".deleting-"
_MODEL_FILES = ("config.json", "adapter_config.json", "*.safetensors")
_LOADABLE_FILES = (  # what loading would take
    "config.json", "model*.safetensors", "model.safetensors.index.json", "adapter_config.json",
    "adapter_model.safetensors",
)  # fmt: skip


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step}"


def step_of(folder: Path) -> int:
    """Return the step in a checkpoint folder's name, -1 for other folders."""
    match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return int(match.group(1)) if match else -1


def write_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Create the folder `target` with the files that `write(folder)` writes, all or nothing.

    Raises:
        CheckpointError: the disk is full or cannot be written; `target` is removed, and other folders are unchanged.
    """
    temp_path = temp_folder_of(target)
    with disk_errors(target, temp_path):
        _write_temporary(temp_path, write)
        _rename(temp_path, target)


def temp_folder_of(target: Path) -> Path:
    """Return the temporary folder of `target`, which has its files until it is complete."""
    return target.with_name(_WRITING + target.name)


def finalize_folder(target: Path, staged: Path | None = None) -> None:
    """Complete a folder whose files are all in `temp_folder_of(target)`, or move them there from `staged` first.

    Raises:
        CheckpointError: as for `write_folder`.
    """
    temp_path = temp_folder_of(target)
    with disk_errors(target, temp_path):
        if staged is not None:
            _move(staged, temp_path)
        seal(temp_path)
        _rename(temp_path, target)


def publish_files(folder: Path, write: Callable[[Path], None]) -> None:
    """Add the files that `write` writes to the existing `folder`, as one set with a manifest.

    The files are written to a temporary folder and renamed one by one. Meanwhile the folder has a marker instead of a
    manifest (see model_folder), so a set that an interruption leaves half old, half new is not taken for a complete
    one. Files of an earlier set that the new one lacks are removed; the marker lists them across interruptions.

    Raises:
        CheckpointError: the disk is full or cannot be written.
    """
    temp_path = folder / (_WRITING + "files")
    with disk_errors(folder, temp_path):
        folder.mkdir(parents=True, exist_ok=True)
        _write_temporary(temp_path, write)
        files, earlier = read_manifest(temp_path / MANIFEST), _published(folder)
        _mark(folder, earlier | files)
        for name in files:
            destination = folder / name
            destination.parent.mkdir(parents=True, exist_ok=True)
            os.replace(temp_path / name, destination)
        for name in earlier.keys() - files.keys():
            (folder / name).unlink(missing_ok=True)
        for changed in {(folder / name).parent for name in files} | {folder}:
            sync(changed)
        os.replace(temp_path / MANIFEST, folder / MANIFEST)
        sync(folder)
        (folder / PUBLISHING).unlink()
        shutil.rmtree(temp_path)


def holds_model(folder: Path) -> str:
    """Describe the model that `folder` contains; "" if there is none."""
    if is_half_written(folder):
        return "a half-written model"
    if read_manifest(folder / MANIFEST):
        return "a trained model"
    found = _matching(folder, _MODEL_FILES)
    return f"a model that this run did not write ({found[0].name})" if found else ""


def holds_foreign_model(folder: Path) -> bool:
    """Return whether `folder` contains a model that `publish_files` did not write."""
    return not _published(folder) and bool(_matching(folder, _MODEL_FILES))


def remove_model(folder: Path) -> None:
    """Remove the model in `folder`, whoever wrote it. It is marked as half-written until all files are gone."""
    files = _published(folder)
    _mark(folder, files)
    for path in [*(folder / name for name in files), *_matching(folder, _LOADABLE_FILES)]:
        path.unlink(missing_ok=True)
    sync(folder)
    (folder / PUBLISHING).unlink()


def checkpoint_folders(output_dir: Path) -> list[Path]:
    """Return all checkpoint folders, complete or not, in the order of their steps."""
    if not output_dir.is_dir():
        return []
    folders = [path for path in output_dir.iterdir() if path.is_dir() and step_of(path) >= 0]
    return sorted(folders, key=step_of)


def newest_complete(output_dir: Path, *, hashes: bool = True) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint with all files intact, and a line for each newer one that was skipped.

    Args:
        hashes: see `problems`.
    """
    skipped: list[str] = []
    for folder in reversed(checkpoint_folders(output_dir)):
        found = problems(folder, hashes=hashes)
        if not found:
            return folder, skipped
        why = "not for this version" if unknown_format(folder / MANIFEST) else "incomplete"
        skipped.append(f"skipped {folder}: {why} ({'; '.join(found[:3])})")
    return None, skipped


def prune(output_dir: Path, limit: int | None, keep: Collection[Path]) -> list[Path]:
    """Remove the oldest complete checkpoints until `limit` are left; those in `keep` stay and count.

    Returns:
        The removed folders.

    Raises:
        CheckpointError: a checkpoint cannot be removed.
    """
    if limit is None or limit <= 0:
        return []
    complete = [folder for folder in checkpoint_folders(output_dir) if not problems(folder, hashes=False)]
    surplus = max(0, len(complete) - limit)
    removed = [folder for folder in complete if folder not in keep][:surplus]
    for folder in removed:
        try:
            remove_folder(folder)
        except OSError as error:
            raise CheckpointError(
                f"save_total_limit: could not remove {folder}: {error}\n  The newest checkpoint is complete; continue "
                "with resume_from_checkpoint=true once files there can be removed, or without save_total_limit."
            ) from error
    return removed


def remove_folder(folder: Path) -> None:
    """Delete a folder so that an interruption cannot leave half of it under its name."""
    temp_path = folder.with_name(_DELETING + folder.name)
    shutil.rmtree(temp_path, ignore_errors=True)
    os.rename(folder, temp_path)
    shutil.rmtree(temp_path)


def remove_leftovers(output_dir: Path) -> list[Path]:
    """Delete the temporary folders of a killed run. Only the holder of the lock may call this."""
    if not output_dir.is_dir():
        return []
    leftovers = [path for path in output_dir.iterdir() if path.name.startswith((_WRITING, _DELETING))]
    for path in leftovers:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return leftovers


@contextmanager
def disk_errors(target: Path, temp_path: Path) -> Iterator[None]:
    """Turn a failing disk into a CheckpointError and remove the half-written folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk with its own exception
        shutil.rmtree(temp_path, ignore_errors=True)
        free = shutil.disk_usage(target.parent).free / 1e6 if target.parent.is_dir() else 0.0
        raise CheckpointError(
            f"could not write {target}: {error}\n  {free:,.0f} MB are free there. Earlier checkpoints are unchanged."
        ) from error


def _write_temporary(temp_path: Path, write: Callable[[Path], None]) -> None:
    shutil.rmtree(temp_path, ignore_errors=True)
    temp_path.mkdir(parents=True)
    write(temp_path)
    seal(temp_path)


def _rename(temp_path: Path, target: Path) -> None:
    if target.exists():  # an incomplete folder of this name
        remove_folder(target)
    os.rename(temp_path, target)
    sync(target.parent)


def _move(staged: Path, temp_path: Path) -> None:
    """Move files to another file system, freeing the space of each at once."""
    shutil.rmtree(temp_path, ignore_errors=True)
    temp_path.mkdir(parents=True)
    for path in sorted(path for path in staged.rglob("*") if path.is_file()):
        destination = temp_path / path.relative_to(staged)
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, destination)
        path.unlink()
    shutil.rmtree(staged)


def _mark(folder: Path, files: Files) -> None:
    """Mark `folder` as half-written, and record the files that publishing has written or is about to write."""
    temp_path = folder / (_WRITING + "marker")
    write_manifest(temp_path, files)
    os.replace(temp_path, folder / PUBLISHING)
    sync(folder)
    (folder / MANIFEST).unlink(missing_ok=True)
    sync(folder)


def _published(folder: Path) -> Files:
    """Return the files that publishing has written into `folder`, also in interrupted attempts."""
    return read_manifest(folder / PUBLISHING) | read_manifest(folder / MANIFEST)


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]

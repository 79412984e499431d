"""Checkpoints and models in an object store, which has no rename: a folder counts there once its manifest does.

Files go up one after another and the manifest last; it goes first where a folder is removed or written anew. A reader
takes a folder for complete only if the manifest can be read and every file that it lists is there with its size, and
compares the SHA-256 of what it has downloaded. So an interruption between any two operations leaves the folder complete
or absent. Needs no Paddle.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from erniekit.errors import CheckpointError
from erniekit.hub.object_store import ObjectFolder, StoredFile, StoreError
from erniekit.manifest import MANIFEST, Files, parse_manifest, problems, read_manifest
from erniekit.progress import Progress
from erniekit.training.checkpoint.atomic_folder import step_of, temp_folder_of
from erniekit.training.checkpoint.manifest import sync

Listing = Mapping[str, StoredFile]  # all files of an output folder by name


def upload_folder(
    store: ObjectFolder, name: str, folder: Path, present: Listing, sent: Callable[[int], None] = lambda size: None
) -> None:
    """Copy a complete folder to the store, under `name`, or into the store's folder itself for "".

    Args:
        present: what the store holds; nothing is done if the folder is complete there with the same files.
        sent: called with the size of each file that has arrived.

    Raises:
        StoreError: the store fails; the folder is not complete there, and calling this again goes on.
        FileNotFoundError: a file is no longer here.
    """
    files, manifest = read_manifest(folder / MANIFEST), _join(name, MANIFEST)
    content = (folder / MANIFEST).read_bytes()
    earlier: Files = {}
    if manifest in present:
        stored = store.read(manifest) or b""
        earlier = parse_manifest(stored.decode("utf-8", "replace"))
        if stored == content and not _missing(name, files, present):
            return
        store.remove(manifest)
    for old in _obsolete(name, files, earlier, present):
        store.remove(old)
    with Progress(f"uploading {name or 'the model'}", _megabytes(files), "MB") as shown:
        for file, entry in files.items():
            so_far = shown.parts(entry["size"], 1e-6)
            store.upload(folder / file, _join(name, file), so_far)
            so_far(entry["size"])
            sent(entry["size"])
    if missing := _missing(name, files, store.list(name)):
        raise StoreError(f"{store.url}: {', '.join(missing[:3])} did not arrive whole, without an error of the store")
    store.write(manifest, content)


def remove_stored(store: ObjectFolder, name: str, present: Listing) -> None:
    """Remove a folder, its manifest first; for "" the model in the store's folder itself."""
    manifest = _join(name, MANIFEST)
    if not name:
        listed = parse_manifest((store.read(MANIFEST) or b"").decode("utf-8", "replace")) if MANIFEST in present else {}
        held = [file for file in listed if file in present]
    else:
        held = [file for file in present if file.startswith(f"{name}/") and file != manifest]
    if manifest in present:
        store.remove(manifest)
    for file in held:
        store.remove(file)


def stored_checkpoints(store: ObjectFolder, present: Listing) -> list[str]:
    """Return the names of the checkpoints that are complete, in the order of their steps; manifests are read."""
    names = {name.split("/")[0] for name in present if name.count("/") == 1 and name.endswith(f"/{MANIFEST}")}
    ordered = sorted((name for name in names if step_of(Path(name)) >= 0), key=lambda name: step_of(Path(name)))
    return [name for name in ordered if is_stored(store, name, present)]


def is_stored(store: ObjectFolder, name: str, present: Listing) -> bool:
    """Return whether a folder is complete in the store, by names and sizes."""
    manifest = _join(name, MANIFEST)
    files = parse_manifest((store.read(manifest) or b"").decode("utf-8", "replace")) if manifest in present else {}
    return bool(files) and not _missing(name, files, present)


def fetch_checkpoint(store: ObjectFolder, name: str, target: Path, present: Listing) -> list[str]:
    """Download a checkpoint into the folder `target`, all or nothing.

    Returns:
        Why it cannot be used, one line each: a file does not have the content that was written. Empty: it is there.

    Raises:
        StoreError: the store fails.
        CheckpointError: it cannot be written here.
    """
    temp_path = temp_folder_of(target)
    try:
        shutil.rmtree(temp_path, ignore_errors=True)
        temp_path.mkdir(parents=True)
        store.download(_join(name, MANIFEST), temp_path / MANIFEST)
        files = read_manifest(temp_path / MANIFEST)
        if missing := _missing(name, files, present):
            return [f"{file} is missing there, or of another size" for file in missing]
        _check_room(store, name, files, temp_path)
        with Progress(f"downloading {name}", _megabytes(files), "MB") as shown:
            for file, entry in files.items():
                so_far = shown.parts(entry["size"], 1e-6)
                store.download(_join(name, file), temp_path / file, so_far)
                so_far(entry["size"])
        if found := problems(temp_path, hashes=True):
            return found
        for path in (*temp_path.rglob("*"), temp_path):
            sync(path)
        if target.exists():  # incomplete, or of another run
            shutil.rmtree(target)
        os.rename(temp_path, target)
        sync(target.parent)
    except OSError as error:
        raise CheckpointError(f"could not write {target}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temp_path, ignore_errors=True)
    return []


def surplus(stored: Collection[str], here: Collection[str], limit: int | None) -> list[str]:
    """Return the stored checkpoints, given in the order of their steps, that a limit no longer keeps.

    What is here stays: that is what the run itself keeps, the best one, too.
    """
    if limit is None or limit <= 0:
        return []
    too_many = max(0, len(stored) - limit)
    return [name for name in stored if name not in here][:too_many]


def _check_room(store: ObjectFolder, name: str, files: Files, folder: Path) -> None:
    needed, free = sum(entry["size"] for entry in files.values()), shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"{store.url}/{name} has {needed / 1e6:,.0f} MB, and {folder.parent} has {free / 1e6:,.0f} MB free\n"
            "  Free some space, or set ERNIEKIT_CACHE to another folder."
        )


def _obsolete(name: str, files: Files, earlier: Files, present: Listing) -> list[str]:
    """Return what an earlier attempt or an earlier model has left in the place of a folder."""
    if name:
        own = {_join(name, file) for file in files}
        return [file for file in present if file.startswith(f"{name}/") and file not in own | {_join(name, MANIFEST)}]
    return [file for file in earlier if file not in files and file in present]


def _missing(name: str, files: Files, present: Listing) -> list[str]:
    """Return the files of a manifest that are not there with their size."""
    sizes = {file: present[_join(name, file)].size for file in files if _join(name, file) in present}
    return [file for file, entry in files.items() if sizes.get(file) != entry["size"]] or ([] if files else [MANIFEST])


def _join(name: str, file: str) -> str:
    return f"{name}/{file}" if name else file


def _megabytes(files: Files) -> float:
    return sum(entry["size"] for entry in files.values()) / 1e6

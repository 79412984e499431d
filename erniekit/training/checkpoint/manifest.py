"""Write manifests, and replace small files at once. `erniekit/manifest.py` reads manifests."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from erniekit.manifest import FORMAT, MANIFEST, Files, hashing_threads, read_manifest, sha256


def seal(folder: Path) -> None:
    """Sync everything in `folder` to disk, and then write its manifest.

    Entries of a subfolder with its own manifest are copied from there, so that nothing is read twice.
    """
    files: Files = {}
    for path in sorted(folder.glob(f"*/{MANIFEST}")):
        files |= {f"{path.parent.name}/{name}": entry for name, entry in read_manifest(path).items()}
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    own = {name: path for name, path in paths.items() if name not in files}
    with hashing_threads() as threads:
        begun = [(name, path, threads.submit(sha256, path), threads.submit(sync, path)) for name, path in own.items()]
        for name, path, digest, synced in begun:
            files[name] = {"size": path.stat().st_size, "sha256": digest.result()}
            synced.result()
    write_manifest(folder / MANIFEST, files)
    for changed in {(folder / name).parent for name in files} | {folder}:
        sync(changed)


def write_manifest(path: Path, files: Files) -> None:
    """Write a manifest and sync it."""
    path.write_text(json.dumps({"format": FORMAT, "files": files}, indent=1), encoding="utf-8")
    sync(path)


def sync(path: Path) -> None:
    """Sync a file's content, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Atomic writes of small files.


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content`, numbers and strings or mappings of them, as JSON and rename it into place."""
    atomic_write_text(path, json.dumps(nan_to_none(content), indent=2, allow_nan=False) + "\n")


def nan_to_none(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return `content` with None instead of NaN and infinities, which JSON lacks."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return nan_to_none(value)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {name: plain(value) for name, value in content.items()}


def atomic_write_text(path: Path, text: str) -> None:
    """Replace the content of `path` at once: a reader sees the old text or the new one, even after a power failure."""
    atomic_write_bytes(path, text.encode())


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """Replace the content of `path` at once, as `atomic_write_text` does."""
    temp_path = path.with_name(f".{path.name}.tmp")
    with temp_path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # otherwise the new name may reach the disk before the content
    os.replace(temp_path, path)

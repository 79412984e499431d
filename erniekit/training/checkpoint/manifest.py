"""Manifests (`manifest.json`: sizes and SHA-256 of a folder's files) and atomic writes of small files.

This version reads checkpoints of both formats:

1  weights, optimizer states and extra state are full tensors in safetensors files
2  they may be sharded by rank (`sharded`), and AdamW's moments may be quantized (`quantized_state`)
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from erniekit.model.storage.model_folder import MANIFEST

FORMAT = 2
Files = dict[str, dict[str, Any]]  # file name -> size and sha256
_THREADS = 4


def seal(folder: Path) -> None:
    """Sync everything in `folder` to disk, and then write its manifest.

    Entries of a subfolder with its own manifest are copied from there, so that nothing is read twice.
    """
    files: Files = {}
    for path in sorted(folder.glob(f"*/{MANIFEST}")):
        files |= {f"{path.parent.name}/{name}": entry for name, entry in read_manifest(path).items()}
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    own = {name: path for name, path in paths.items() if name not in files}
    with _threads() as threads:
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


def read_manifest(path: Path) -> Files:
    """Return the listed files; empty if the manifest cannot be read, or lists a file outside its folder."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))["files"]
        files = {name: {"size": int(entry["size"]), "sha256": entry["sha256"]} for name, entry in stored.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return files if all(_stays_inside(PurePosixPath(name)) for name in files) else {}


def unknown_format(path: Path) -> str:
    """Return the manifest's format if this version cannot read it; otherwise ""."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    known = isinstance(stored, dict) and stored.get("format") in range(1, FORMAT + 1)
    return "" if known or not isinstance(stored, dict) else str(stored.get("format"))


def sha256(path: Path) -> str:
    """Return the hash of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def hashes_of(paths: Iterable[Path]) -> list[str]:
    """Return the hashes of several files, in order."""
    with _threads() as threads:
        return list(threads.map(sha256, paths))


def sync(path: Path) -> None:
    """Sync a file's content, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Return threads for hashing and disk waits, which both release the interpreter lock."""
    threads = ThreadPoolExecutor(_THREADS)
    try:
        yield threads
    finally:
        threads.shutdown(cancel_futures=True)


def _stays_inside(name: PurePosixPath) -> bool:
    return bool(name.parts) and not name.is_absolute() and ".." not in name.parts


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

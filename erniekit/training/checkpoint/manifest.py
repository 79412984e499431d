"""The list of a complete folder's files, `manifest.json`: their sizes and SHA-256, and the format of what they hold.

Formats of checkpoints, each of which this version reads:

1  weights, optimizer states and what is beside the model are whole, in safetensors files
2  they may be parts that ranks have written (`rank_files`), and AdamW's moments may be codes (`compressed_state`)
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
Files = dict[str, dict[str, Any]]  # name in the folder -> size and sha256
_THREADS = 4


def seal(folder: Path) -> None:
    """Put everything in `folder` on the disk, and then the list of its files.

    What a folder inside has sealed itself is taken from its list, so that nothing is read twice.
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
    """Put a list of files on the disk."""
    path.write_text(json.dumps({"format": FORMAT, "files": files}, indent=1), encoding="utf-8")
    sync(path)


def read_manifest(path: Path) -> Files:
    """The files that are listed; empty where the list cannot be read, or names a file outside its folder."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))["files"]
        files = {name: {"size": int(entry["size"]), "sha256": entry["sha256"]} for name, entry in stored.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return files if all(_stays_inside(PurePosixPath(name)) for name in files) else {}


def unknown_format(path: Path) -> str:
    """Which format a manifest names, if it is one that this version does not read; empty otherwise."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    known = isinstance(stored, dict) and stored.get("format") in range(1, FORMAT + 1)
    return "" if known or not isinstance(stored, dict) else str(stored.get("format"))


def sha256(path: Path) -> str:
    """The hash of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def hashes_of(paths: Iterable[Path]) -> list[str]:
    """The hashes of several files, in their order."""
    with _threads() as threads:
        return list(threads.map(sha256, paths))


def sync(path: Path) -> None:
    """Have the kernel put a file's content, or a folder's list of names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Threads for hashing and for waiting for a disk, during neither of which the interpreter is held."""
    threads = ThreadPoolExecutor(_THREADS)
    try:
        yield threads
    finally:
        threads.shutdown(cancel_futures=True)


def _stays_inside(name: PurePosixPath) -> bool:
    return bool(name.parts) and not name.is_absolute() and ".." not in name.parts


# Small files that are written whole or not at all.


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content`, numbers and words or mappings of them, as JSON and rename it into place."""
    atomic_write_text(path, json.dumps(nan_to_none(content), indent=2, allow_nan=False) + "\n")


def nan_to_none(content: Mapping[str, Any]) -> dict[str, Any]:
    """`content` with None in the place of NaN and infinities, which JSON does not know."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return nan_to_none(value)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {name: plain(value) for name, value in content.items()}


def atomic_write_text(path: Path, text: str) -> None:
    """Give `path` this content at once: a reader sees the old text or the new one, also after a loss of power."""
    temp_path = path.with_name(f".{path.name}.tmp")
    with temp_path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # else the new name may reach the disk before the content
    os.replace(temp_path, path)

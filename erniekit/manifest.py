"""Manifests: `manifest.json` lists a folder's files with size and SHA-256, and every reader of the folder compares.

`erniekit` writes one last into each checkpoint and each model, so its presence says that the folder is complete. A
model folder from elsewhere has none and is read as it is. This version reads manifests of both formats:

1  weights, optimizer states and extra state are full tensors in safetensors files
2  they may be sharded by rank, and AdamW's moments may be quantized
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from erniekit.errors import ModelFileError

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

MANIFEST = "manifest.json"
FORMAT = 2
Files = dict[str, dict[str, Any]]  # file name -> size and sha256
_THREADS = 4
_BLOCK = 1 << 20
_WEIGHTS = ".safetensors"
_DOCUMENTATION = ".md"  # people edit the model card
_SMALL = 64 << 20  # bytes of a file that is compared with every use of its folder: tokenizers are below 40 MB
_SETTLED_NS = 100_000_000  # a file system may give two writes within a few milliseconds the same time
_PROBLEMS_SHOWN = 5

_Identity = tuple[int, int, int, int]
_hashes: dict[Path, tuple[_Identity, str]] = {}  # of the files that this process has read, while they are the same


def read_manifest(path: Path) -> Files:
    """Return the listed files; empty if the manifest cannot be read, or lists a file outside its folder."""
    try:
        return parse_manifest(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def parse_manifest(text: str) -> Files:
    """Return the listed files; empty if the text is no manifest, or lists a file outside its folder."""
    try:
        stored = json.loads(text)["files"]
        files = {name: {"size": int(entry["size"]), "sha256": entry["sha256"]} for name, entry in stored.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return files if all(stays_inside(PurePosixPath(name)) for name in files) else {}


def unknown_format(path: Path) -> str:
    """Return the manifest's format if this version cannot read it; otherwise ""."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ""
    known = isinstance(stored, dict) and stored.get("format") in range(1, FORMAT + 1)
    return "" if known or not isinstance(stored, dict) else str(stored.get("format"))


def problems(folder: Path, *, hashes: bool) -> list[str]:
    """List why `folder` is not complete, one line each; empty if it is complete.

    Args:
        hashes: also read every file and compare its hash; otherwise only names and sizes.
    """
    if other := unknown_format(folder / MANIFEST):
        return [f"it has format {other} of another version of ERNIEKit, and this version reads formats up to {FORMAT}"]
    files = read_manifest(folder / MANIFEST)
    if not files:
        return [f"{MANIFEST} is missing or unreadable"]
    return _differences(folder, files, hashes=hashes)


def refuse_changed(folder: Path, names: Iterable[str] = (), *, hashes: bool = True) -> None:
    """Compare files of a folder with its manifest, if it has one. Whatever opens a file of a model calls this.

    The small files (configurations, tokenizer) are always compared, because together they say what the model is;
    weights take longer, so only those are that are about to be read. A file is read once by a process, and on each
    machine by the first rank alone: it ends the job where a file has changed.

    Args:
        names: the files with weights that are about to be read; a manifest must list them.
        hashes: whether their values are about to be read; for a look at their headers the sizes are compared.

    Raises:
        ModelFileError: a file is missing, has changed since it was written, or was added; says what to do.
    """
    path = folder / MANIFEST
    if os.environ.get("PADDLE_LOCAL_RANK", "0") != "0" or not path.is_file():
        return
    files, asked = read_manifest(path), set(names)
    if not files or unknown_format(path):
        if _is_foreign(path):
            return
        found = problems(folder, hashes=False)
    else:
        found = [f"{name} is not in {MANIFEST}" for name in sorted(asked - files.keys())]
        small = {name: files[name] for name in files if _is_small(name, files)}
        found += _differences(folder, small, hashes=True)
        weights = {name: files[name] for name in files if name in asked and name not in small}
        found += _differences(folder, weights, hashes=hashes)
    if found:
        more = [f"... and {len(found) - _PROBLEMS_SHOWN} more"] if len(found) > _PROBLEMS_SHOWN else []
        raise ModelFileError(
            f"{folder}: the files are not those that were written:\n"
            + "".join(f"  {line}\n" for line in (*found[:_PROBLEMS_SHOWN], *more))
            + "  Copy the folder again from where it came from, use another checkpoint, or train or export it again.\n"
            f"  If you have changed it yourself, remove {path}: then it is read as it is."
        )


def _differences(folder: Path, files: Files, *, hashes: bool) -> list[str]:
    found = {}
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            found[name] = "is missing"
        elif path.stat().st_size != expected["size"]:
            found[name] = f"has {path.stat().st_size} bytes instead of {expected['size']}"
    if hashes:
        names = [name for name in files if name not in found]
        for name, digest in zip(names, hashes_of(folder / name for name in names), strict=True):
            if digest != files[name]["sha256"]:
                found[name] = "does not have the content that was written (its SHA-256 differs)"
    return [f"{name} {found[name]}" for name in files if name in found]


def _is_small(name: str, files: Files) -> bool:
    own = "/" not in name and not name.endswith((_WEIGHTS, _DOCUMENTATION))  # a rank's files are read by that rank
    return own and files[name]["size"] <= _SMALL


def _is_foreign(path: Path) -> bool:
    """Whether this is another program's `manifest.json`."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return not isinstance(stored, dict) or not {"format", "files"} <= stored.keys()


def stays_inside(name: PurePosixPath) -> bool:
    """Return whether a relative name stays in the folder that it belongs to."""
    return bool(name.parts) and not name.is_absolute() and ".." not in name.parts


# Hashes.


def sha256(path: Path) -> str:
    """Return the hash of a file's content."""
    import hashlib  # loads a library of some megabytes, which most commands do without

    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def hashes_of(paths: Iterable[Path]) -> list[str]:
    """Return the hashes of several files, in order. A file that this process has read before is not read again, unless
    it has been written since."""
    with hashing_threads() as threads:
        return list(threads.map(_hash_once, paths))


def _hash_once(path: Path) -> str:
    before = path.stat()
    identity = (before.st_ino, before.st_size, before.st_mtime_ns, before.st_ctime_ns)
    key = path.absolute()
    if key in _hashes and _hashes[key][0] == identity:
        return _hashes[key][1]
    digest = sha256(path)
    if time.time_ns() - max(before.st_mtime_ns, before.st_ctime_ns) > _SETTLED_NS:
        _hashes[key] = (identity, digest)
    return digest


@contextmanager
def hashing_threads() -> Iterator[ThreadPoolExecutor]:
    """Return threads for hashing and disk waits, which both release the interpreter lock."""
    from concurrent.futures import ThreadPoolExecutor

    threads = ThreadPoolExecutor(_THREADS)
    try:
        yield threads
    finally:
        threads.shutdown(cancel_futures=True)

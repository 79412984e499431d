"""Files, folders and models of object stores, downloaded once into the cache.

<cache>/object-storage/fetched/<digest of the URL>/
  <digest of names, sizes and tags>/<last part of the URL>    the file or the folder, as it was then
  current.json                                                which of these is the newest

A file that is there with its size is not downloaded again, so an interrupted download goes on. Processes of one machine
take turns. A process with `FETCHED` in its environment takes what is there and asks no store: its launcher has fetched,
and all ranks are to see the same files.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from erniekit.config.object_urls import joined, url_problem
from erniekit.data.tokenizers.files import ADDITIONAL_TEMPLATES
from erniekit.environment import cache_folder
from erniekit.errors import ModelFileError
from erniekit.hub.object_store import ObjectFolder, StoredFile, StoreError, open_folder
from erniekit.manifest import MANIFEST, parse_manifest, stays_inside
from erniekit.progress import Progress
from erniekit.redaction import redacted

logger = logging.getLogger(__name__)

FETCHED = "ERNIEKIT_URLS_FETCHED"  # environment variable of ranks
RUN_FILE = "erniekit-run.json"  # of an output folder in a store, see training/checkpoint/uploads.py
FOLDER = "object-storage"  # in the cache
_CURRENT, _PARTIAL = "current.json", ".partial"
_DIGEST_BYTES = 8
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_WEIGHTS = "*.safetensors"
_TRAINING_STATE = ("optimizer*.safetensors", "beside_model*.safetensors")  # of a checkpoint; a model does without
_ABOUT_THE_RUN = ("training_config.yaml", "train_results.json", "eval_results.json")
_MODEL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.yaml")
_PARTS = (ADDITIONAL_TEMPLATES, "audio_tokenizer")  # folders in that of a model
_Files = Mapping[str, StoredFile]
_folders: dict[tuple[str, bool], Path] = {}  # (URL of a model, with its weights) -> folder, of this process


def fetch(url: str, cache: Path) -> Path:
    """Return the path of a file or a folder of a store in the cache; what is not there yet is downloaded.

    Raises:
        StoreError: there is no such file, or it cannot be downloaded.
    """
    return _fetch(url, cache, lambda store, files: (files, files))


def fetch_model(url: str, *, weights: bool) -> Path:
    """Return the folder of a model or of adapters in the cache, or a configuration file, as `fetch` does. Code and
    pickles are never downloaded.

    Args:
        weights: fetch the weights, too.

    Raises:
        StoreError, ModelFileError: there is no such folder, or a run has not finished writing it.
    """
    if problem := url_problem(url):
        raise StoreError(f"{redacted(url)} {problem}")
    if (url, weights) not in _folders:
        _folders[url, weights] = _fetch(
            url, cache_folder(), lambda store, files: _model_files(store, files, weights=weights)
        )
    return _folders[url, weights]


def fetched(url: str, cache: Path) -> Path | None:
    """Return where the newest download of a URL is; None if there is none. No store is asked."""
    home = _home(url, cache)
    try:
        current = json.loads((home / _CURRENT).read_text(encoding="utf-8"))["folder"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    path = home / PurePosixPath(str(current)).name / _name(url)
    return path if path.exists() else None


def forget_models() -> None:
    """Ask the stores again for models that this process has fetched."""
    _folders.clear()


def _fetch(url: str, cache: Path, choose: Callable[[ObjectFolder, _Files], tuple[_Files, _Files]]) -> Path:
    """Download what is chosen of a folder, or a file.

    Args:
        choose: returns the files to download, and those by which one content of the folder is told from another.
    """
    if FETCHED in os.environ and (path := fetched(url, cache)) is not None:
        return path
    store, home = open_folder(url), _home(url, cache)
    single = store.file()
    chosen: _Files
    identity: _Files
    chosen, identity = ({"": single}, {"": single}) if single else choose(store, store.list())
    if not chosen:
        raise StoreError(f"{url}: there is no such file or folder, or it is empty\n  Look at its name and its bucket.")
    if bad := next((name for name in chosen if name and not stays_inside(PurePosixPath(name))), None):
        raise StoreError(f"{url}: the name {bad!r} leaves the folder; nothing is downloaded")
    digest = hashlib.blake2b(repr(sorted(identity.items())).encode(), digest_size=_DIGEST_BYTES).hexdigest()
    try:
        with locked(home):
            _download(store, chosen, home / digest / _name(url))
            current = home / (_CURRENT + _PARTIAL)
            current.write_text(json.dumps({"url": url, "folder": digest}), encoding="utf-8")
            os.replace(current, home / _CURRENT)
    except OSError as error:
        raise StoreError(
            f"{url}: could not be written to the cache {home}: {error.strerror or error}\n  Free some space, or set "
            "ERNIEKIT_CACHE to another folder; what has been downloaded stays."
        ) from None
    return home / digest / _name(url)


def _download(store: ObjectFolder, files: _Files, target: Path) -> None:
    """Download what is missing below `target`, each file under another name until it is complete."""
    missing = {name: file for name, file in files.items() if _size(_place(target, name)) != file.size}
    if not missing:
        return
    total = sum(file.size for file in missing.values())
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < total:
        raise StoreError(
            f"{store.url}: {total / 1e6:,.0f} MB are to be downloaded, and {target.parent} has {free / 1e6:,.0f} MB "
            "free\n  Free some space, or set ERNIEKIT_CACHE to another folder."
        )
    logger.info(f"downloading {store.url}: {_described(len(missing), total)}, into {target}")
    with Progress(f"downloading {store.url}", total / 1e6, "MB") as shown:
        for name, file in missing.items():
            place = _place(target, name)
            partial = place.with_name(f".{place.name}{_PARTIAL}")
            so_far = shown.parts(file.size, 1e-6)
            store.download(name, partial, so_far)
            if _size(partial) != file.size:
                raise StoreError(
                    f"{joined(store.url, name)}: {_size(partial):,} bytes have come, and the store says {file.size:,}\n"
                    "  Is it being written? Give the same command again once it is complete."
                )
            os.replace(partial, place)
            so_far(file.size)


def _model_files(store: ObjectFolder, files: _Files, *, weights: bool) -> tuple[_Files, _Files]:
    """Choose the files of a model; if it has a manifest, all that this lists have to be there.

    Returns:
        The files to download, and those that make the model: its manifest, or all but the training state.
    """
    names = [name for name in files if any(fnmatch(name, pattern) for pattern in _MODEL_FILES) and _is_near(name)]
    listed = parse_manifest((store.read(MANIFEST) or b"").decode("utf-8", "replace")) if MANIFEST in files else {}
    if listed:
        wrong = [name for name, entry in listed.items() if name not in files or files[name].size != entry["size"]]
        if wrong:
            raise ModelFileError(
                f"{store.url} is not complete: {', '.join(sorted(wrong)[:5])} "
                f"{'is' if len(wrong) == 1 else 'are'} missing or of another size\n"
                "  Wait for the upload that writes it, or name another checkpoint."
            )
    elif RUN_FILE in files or _CHECKPOINT.fullmatch(_name(store.url)):
        complete = sorted(
            {name.split("/")[0] for name in files if name.endswith(f"/{MANIFEST}") and name.count("/") == 1}
        )
        held = f"It holds {', '.join(complete[:4])}; name one of these." if complete else "Wait until it is uploaded."
        raise ModelFileError(
            f"{store.url} has no complete model: it lacks {MANIFEST}, which is uploaded last.\n  {held}"
        )
    if listed:  # what an earlier model has left there is none of this one's
        names = [name for name in names if name in listed or name == MANIFEST or name in _ABOUT_THE_RUN]
    state = {name for name in files if any(fnmatch(name, pattern) for pattern in _TRAINING_STATE)}
    of_weights = [name for name in files if fnmatch(name, _WEIGHTS) and _is_near(name) and name not in state]
    of_weights = [name for name in of_weights if not listed or name in listed]
    identity = [MANIFEST] if listed else [*names, *of_weights]
    chosen = [*names, *of_weights] if weights else names
    return {name: files[name] for name in chosen}, {name: files[name] for name in identity}


def _is_near(name: str) -> bool:
    """Whether a file lies in the folder itself, or in one that belongs to a model; `*` also matches `/`."""
    folder, _, inner = name.rpartition("/")
    return folder in ("", *_PARTS) and bool(inner)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time into the body, of those on this machine that name this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _home(url: str, cache: Path) -> Path:
    return cache / FOLDER / "fetched" / digest_of(url)


def digest_of(url: str) -> str:
    """Return a short digest of a URL, for names in the cache."""
    return hashlib.blake2b(joined(url, "").encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _name(url: str) -> str:
    return joined(url, "").rpartition("/")[2]


def _place(target: Path, name: str) -> Path:
    return target / name if name else target


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _described(count: int, size: int) -> str:
    return f"{count:,} file{'s' if count != 1 else ''}, {size / 1e6:,.1f} MB"

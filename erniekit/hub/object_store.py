"""Folders of object stores: list, read, write and remove files through fsspec, with retries and plain errors.

Credentials are those that the store's own library finds, in its variables, files or login; no URL or message has any.
fsspec is imported when a store is opened, so a run without URLs does without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from erniekit.config.object_urls import joined, scheme_of, store_of
from erniekit.environment import is_importable
from erniekit.errors import UserError
from erniekit.redaction import redacted

logger = logging.getLogger(__name__)
T = TypeVar("T")
Moved = Callable[[int], None]

WAITS = (1.0, 4.0, 16.0)  # seconds before each further attempt
INSTALL = "pip install 'erniekit[storage]'"
# What says that a file is another one, by the names that the libraries of stores have for it; beside its size.
_TAGS = ("ETag", "etag", "generation", "md5Hash", "content_md5", "last_modified", "LastModified", "mtime", "created")
_CHARACTERS_SHOWN = 300


class StoreError(UserError):
    """A store cannot be reached, or refuses."""


class StoredFile(NamedTuple):
    """What a store says of a file: its size in bytes, and a text that changes with its content."""

    size: int
    tag: str


@dataclass(frozen=True)
class ObjectFolder:
    """A folder of an object store, which exists as far as there are files below it.

    All methods try again where the store fails, and raise StoreError where it goes on failing. Names are relative, with
    `/` between their parts.

    Attributes:
        url: without a `/` at the end.
        files: the file system of fsspec.
        root: the folder's path there.
        waits: seconds before each further attempt.
    """

    url: str
    files: Any
    root: str
    waits: tuple[float, ...] = WAITS

    def list(self, below: str = "") -> dict[str, StoredFile]:
        """Return all files below a folder of this one, by name; {} where there are none."""
        place = self._path(below)

        def find() -> dict[str, StoredFile]:
            self.files.invalidate_cache()
            try:
                found = self.files.find(place, detail=True)
            except FileNotFoundError:
                return {}
            names = {path: path.removeprefix(self.root).lstrip("/") for path in found if path != place}
            return {
                name: _stored_file(found[path]) for path, name in names.items() if found[path].get("type") == "file"
            }

        return self._try(f"list {joined(self.url, below)}", find)

    def file(self, name: str = "") -> StoredFile | None:
        """Return what the store says of a file, by default of the URL itself; None if there is no such file."""

        def info() -> StoredFile | None:
            self.files.invalidate_cache()
            try:
                found = self.files.info(self._path(name))
            except FileNotFoundError:
                return None
            return _stored_file(found) if found.get("type") == "file" else None

        return self._try(f"look for {joined(self.url, name)}", info)

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if there is none."""

        def cat() -> bytes | None:
            try:
                return bytes(self.files.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

        return self._try(f"read {joined(self.url, name)}", cat)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, in the place of an earlier one."""
        self._try(f"write {joined(self.url, name)}", lambda: self._pipe(name, content))

    def upload(self, path: Path, name: str, moved: Moved | None = None) -> None:
        """Copy a file of this machine to the store, in the place of an earlier one.

        Args:
            moved: called with the bytes of this file that have gone so far, as far as the store's library tells.

        Raises:
            FileNotFoundError: there is no such file here.
        """

        def put() -> None:
            with path.open("rb"):  # so that what is missing here is not taken for an error of the store
                pass
            self.files.put_file(str(path), self._path(name), **_counted(moved))

        self._try(f"upload {joined(self.url, name)}", put, passes=lambda: not path.exists())

    def download(self, name: str, path: Path, moved: Moved | None = None) -> None:
        """Copy a file of the store to this machine. `moved`: as for `upload`."""
        path.parent.mkdir(parents=True, exist_ok=True)

        def get() -> None:
            self.files.get_file(self._path(name), str(path), **_counted(moved))

        self._try(f"download {joined(self.url, name)}", get)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

        def rm() -> None:
            try:
                self.files.rm_file(self._path(name))
            except FileNotFoundError:
                return

        self._try(f"remove {joined(self.url, name)}", rm)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def _pipe(self, name: str, content: bytes) -> None:
        self.files.pipe_file(self._path(name), content)

    def _try(self, what: str, action: Callable[[], T], passes: Callable[[], bool] = lambda: False) -> T:
        """Return what `action` returns, after some failures, too.

        Args:
            passes: whether an error is not one of the store, so that it is raised as it is.
        """
        for wait in (*self.waits, None):
            try:
                return action()
            except Exception as error:  # each library has errors of its own, and few of them are OSErrors
                if passes():
                    raise
                reason = short_reason(error)
                if wait is None or _stays(error):
                    raise StoreError(f"could not {what}: {reason}{_advice(self.url, error)}") from None
                logger.debug(f"could not {what}: {reason}; trying again in {wait:g} s")
                time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")


def open_folder(url: str) -> ObjectFolder:
    """Open the folder of a URL, or its file, without asking the store.

    Raises:
        StoreError: a package is missing, or the store's library does not find what it needs.
    """
    if lacking := lacking_package(url):
        raise StoreError(f"{url}: {lacking}")
    from fsspec.core import url_to_fs

    options: Mapping[str, Any] = {"auto_mkdir": True} if scheme_of(url) == "file" else {}
    try:
        files, root = url_to_fs(url, use_listings_cache=False, **options)
    except Exception as error:  # as above
        raise StoreError(f"{url} cannot be opened: {short_reason(error)}{_advice(url, error)}") from None
    return ObjectFolder(url.rstrip("/"), files, str(root).rstrip("/"))


def lacking_package(url: str) -> str:
    """Return which package a URL needs that is not installed, and how to install it; "" if all are there."""
    module = store_of(url).module
    if not is_importable("fsspec"):
        return f"URLs of object stores need fsspec: {INSTALL} {module}".rstrip()
    if module and not is_importable(module):
        return f"URLs of {store_of(url).title} need {module}: {INSTALL} {module}"
    return ""


def short_reason(error: BaseException) -> str:
    """Return an error of a library in one line, without secrets."""
    text = redacted(" ".join(str(error).split()))[:_CHARACTERS_SHOWN]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _counted(moved: Moved | None) -> dict[str, Any]:
    """Return what makes the library of a store call `moved`."""
    if moved is None:
        return {}
    from fsspec.callbacks import Callback

    return {"callback": Callback(hooks={"moved": lambda size, value, **_: moved(value)})}


def _stays(error: BaseException) -> bool:
    """Whether another attempt would fail in the same way."""
    return isinstance(error, (PermissionError, FileNotFoundError)) or "Credentials" in type(error).__name__


def _advice(url: str, error: BaseException) -> str:
    title = store_of(url).title
    named = f"{type(error).__name__} {error}".lower()
    if isinstance(error, PermissionError) or "credential" in named or "forbidden" in named or "denied" in named:
        return f"\n  Give this machine access as the library of {title} wants it: docs/object-storage.md lists how."
    return "\n  Look whether the bucket exists and this machine reaches it; then give the same command again."


def _stored_file(info: Mapping[str, Any]) -> StoredFile:
    tag = next((f"{name} {info[name]}" for name in _TAGS if info.get(name) is not None), "")
    return StoredFile(int(info.get("size") or 0), tag)

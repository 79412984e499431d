"""Object stores for tests: fsspec's memory, which can be killed, cut off or made to fail between any two operations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from erniekit.hub.object_store import ObjectFolder, open_folder
from erniekit.training.checkpoint.manifest import seal

_numbers = itertools.count()
CHANGES = ("put_file", "pipe_file", "rm_file")


class KilledError(BaseException):
    """Stands for `kill -9`: no handler of errors catches it."""


class Faults:
    """A file system that does something before its n-th change, or instead of it.

    Args:
        at: the number of the change, from 0; -1: never.
        act: called with the operation, which it may call or not.
    """

    def __init__(self, files: Any, at: int = -1, act: Callable[[Callable[[], Any]], Any] | None = None) -> None:
        self._files, self._at, self._act = files, at, act
        self.changes = 0

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._files, name)
        if name not in CHANGES:
            return operation

        def change(*arguments: Any, **options: Any) -> Any:
            number, self.changes = self.changes, self.changes + 1
            call = lambda: operation(*arguments, **options)  # noqa: E731
            return self._act(call) if number == self._at and self._act else call()

        return change


def killed_before(call: Callable[[], Any]) -> None:
    raise KilledError


def with_faults(store: ObjectFolder, at: int = -1, act: Callable[[Callable[[], Any]], Any] | None = None) -> Any:
    """The same folder with a file system of `Faults`, and no waiting."""
    return ObjectFolder(store.url, Faults(store.files, at, act), store.root, waits=(0.0, 0.0))


def sealed(folder: Path, files: dict[str, str]) -> Path:
    """A complete folder with these files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    seal(folder)
    return folder


@pytest.fixture
def memory_url() -> str:
    """A URL below which there is nothing yet."""
    return f"memory://bucket-{next(_numbers)}/run"


@pytest.fixture
def store(memory_url: str) -> Iterator[ObjectFolder]:
    """An empty folder in memory, without waiting."""
    folder = open_folder(memory_url)
    yield ObjectFolder(folder.url, folder.files, folder.root, waits=(0.0, 0.0))
    folder.files.store.clear()
    folder.files.pseudo_dirs[:] = [""]


@pytest.fixture(params=["memory", "file"])
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A URL of each kind of store that needs no network."""
    name = f"bucket-{next(_numbers)}/run"
    return f"memory://{name}" if request.param == "memory" else f"file://{tmp_path}/{name}"

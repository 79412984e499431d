"""The folders that the page may see: paths are resolved with their links, and those that lie elsewhere are refused."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from erniekit.config.registry import PARAMETERS
from erniekit.errors import UserError

STATE = ".erniekit-ui"  # the page's own folder, with a folder for each run that it has started
CONFIGURATIONS = (".yaml", ".yml")
MOST_FOLDERS, DEPTH = 5_000, 6  # that are looked through for runs, models and configurations


class OutsideError(UserError):
    """A path lies outside the folders that the page may see."""


@dataclass(frozen=True)
class Workspace:
    """The working folder, in which the page reads and writes, and further folders, which runs may read.

    Attributes:
        root: absolute, without links.
        also: likewise.
    """

    root: Path
    also: tuple[Path, ...] = ()

    @classmethod
    def of(cls, folder: Path, also: tuple[Path, ...] = ()) -> Workspace:
        return cls(folder.resolve(), tuple(path.expanduser().resolve() for path in also))

    def inside(self, name: str) -> Path:
        """Return the absolute path of a file or folder in the working folder, links resolved; it need not exist.

        Raises:
            OutsideError: it lies elsewhere, or a part of its name begins with a dot.
        """
        path = self._resolved(name)
        if not path.is_relative_to(self.root):
            raise OutsideError(f"{name}: lies outside of {self.root}, the folder of this page")
        if any(part.startswith(".") for part in path.relative_to(self.root).parts):
            raise OutsideError(f"{name}: files and folders whose names begin with a dot are not shown here")
        return path

    def readable(self, name: str) -> bool:
        """Return whether a path lies in the working folder or in a further one, links resolved."""
        try:
            path = self._resolved(name)
        except OutsideError:
            return False
        return any(path.is_relative_to(folder) for folder in (self.root, *self.also))

    def name(self, path: Path) -> str:
        """Return a path as the page shows it: relative to the working folder; "." for that folder."""
        return path.relative_to(self.root).as_posix()

    def outside(self, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield (parameter, what is wrong) for each path of a configuration that lies elsewhere.

        A name that is no file here, such as `org/model` of a hub, is one below the working folder.
        """
        for name, declared in PARAMETERS.items():
            if not (declared.kind.names_path and values[name]):
                continue
            value = values[name]
            for path in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(path, str) and not self.readable(path):
                    yield name, f"{path} lies outside of {self.root}, the folder of this page"

    def walk(self) -> Iterator[tuple[Path, list[str]]]:
        """Yield the folders below the working one with the names of their files; none with a dot, no links.

        The first `MOST_FOLDERS` folders are looked at, `DEPTH` levels deep.
        """
        for here, folders, files in islice(os.walk(self.root), MOST_FOLDERS):
            path = Path(here)
            deep = len(path.relative_to(self.root).parts) >= DEPTH
            kept = sorted(name for name in folders if not name.startswith((".", "__")) and name != "node_modules")
            folders[:] = [] if deep else kept
            yield path, files

    def _resolved(self, name: str) -> Path:
        try:
            return (self.root / Path(name).expanduser()).resolve()
        except (ValueError, OSError, RuntimeError):  # a NUL character; links in a circle; ~nobody
            raise OutsideError(f"{name!r}: is no path") from None

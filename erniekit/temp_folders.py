"""Temporary folders that do not outlive their owners for long, however these end. Needs no Paddle.

A folder belongs to the processes that hold its lock, which the kernel releases with the last of them. The next start of
the same user removes the folders that nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class TempFolder:
    """A folder owned by this process and those that inherit `lock` until all have closed it."""

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder, self.lock = folder, lock

    def close(self) -> None:
        """Release the lock; another process still has it, or the folder is gone."""
        os.close(self.lock)


def new_temp_folder(prefix: str, parent: Path | None = None) -> TempFolder:
    """Create an empty folder for this user only, by default where the system keeps temporary files."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another process removed it, as below
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return TempFolder(folder, lock)
        os.close(lock)  # before it was locked, another process removed it as abandoned


@contextmanager
def temp_folder(prefix: str) -> Iterator[Path]:
    """Remove what killed processes have left of such folders, create one, and remove it after the body."""
    remove_abandoned(prefix)
    own = new_temp_folder(prefix)
    try:
        yield own.folder
    finally:
        shutil.rmtree(own.folder, ignore_errors=True)
        own.close()


def remove_abandoned(prefix: str, parent: Path | None = None) -> list[Path]:
    """Remove this user's folders that no process holds, and return them: their owners were killed."""
    removed = []
    for folder in (parent or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):  # its owner has just removed it, or it is a file of others
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        finally:
            os.close(lock)
    return removed

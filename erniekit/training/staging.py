"""Where a checkpoint waits for the process that completes it: a folder in shared memory, removed when it is done.

A folder there belongs to the processes that hold its lock, which ends with the last of them; what nobody holds any more
is removed by the next run of the same user. Needs no Paddle.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from erniekit.environment import available_memory

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "erniekit-checkpoint-"
_OTHER_FILES = 64 << 20  # bytes: a checkpoint's files beside tensors, above all the tokenizer's
_HEADROOM = 1.05


class Staging:
    """A folder in shared memory that this process, and those that inherit `lock`, hold until all have closed it."""

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder, self.lock = folder, lock

    def close(self) -> None:
        """Let go of it; another process still has it, or it is gone."""
        os.close(self.lock)


def memory_shortage(tensor_bytes: int, shared_memory: Path | None = None) -> str:
    """What keeps a checkpoint with so many bytes of tensors from waiting in shared memory; empty for nothing."""
    shared = shared_memory or SHARED_MEMORY
    needed = int(tensor_bytes * _HEADROOM) + _OTHER_FILES
    if not (shared.is_dir() and os.access(shared, os.W_OK)):
        return f"there is no shared memory at {shared}"
    free, memory = shutil.disk_usage(shared).free, available_memory()
    if free < needed:
        return f"{shared} has {_mb(free)} free of the {_mb(needed)} needed"
    if memory is not None and memory < needed:
        return f"{_mb(memory)} of memory are available of the {_mb(needed)} needed"
    return ""


def new_staging(shared_memory: Path | None = None) -> Staging:
    """An empty folder in shared memory, for this user only."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=shared_memory or SHARED_MEMORY))
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # as below
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return Staging(folder, lock)
        os.close(lock)  # another run took it, without a lock yet, for one that nobody holds


def remove_abandoned(say: Callable[[str], None], shared_memory: Path | None = None) -> None:
    """Remove this user's folders that no process holds: those of runs whose processes were all killed."""
    for folder in (shared_memory or SHARED_MEMORY).glob(f"{_PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:  # the process that held it has just removed it
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
            say(f"removed {folder}: a checkpoint that a killed run had not written")
        finally:
            os.close(lock)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"

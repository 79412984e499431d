"""Locks on an output folder: one run, and one process that completes a checkpoint. Needs no Paddle.

The kernel releases a lock when its process ends, however it ends. The process that completes a checkpoint has a
separate lock, because it may outlive the run that started it: the next run waits for it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from erniekit.errors import CheckpointError

logger = logging.getLogger(__name__)

_RUN, _WRITER = ".erniekit.lock", ".erniekit.writer.lock"
_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # then the user must not start two runs in one folder


@contextmanager
def locked(output_dir: Path) -> Iterator[None]:
    """Lock `output_dir` for one run, after an earlier run's checkpoint writer has finished.

    Raises:
        CheckpointError: another run has the lock, or the folder cannot be written.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        file = (output_dir / _RUN).open("a")
    except OSError as error:
        raise CheckpointError(f"output_dir {output_dir} cannot be written: {error.strerror}") from None
    with file:
        if not _try_lock(file.fileno()):
            raise CheckpointError(
                f"another run is writing to {output_dir}; wait for it to end, or choose another output_dir"
            )
        _wait_for_writer(output_dir)
        yield


@contextmanager
def locked_by_writer(output_dir: Path) -> Iterator[None]:
    """Lock `output_dir` for the process that completes a checkpoint.

    Raises:
        CheckpointError: another process has the lock, or the folder cannot be written.
    """
    try:
        file = (output_dir / _WRITER).open("a")
    except OSError as error:
        raise CheckpointError(f"output_dir {output_dir} cannot be written: {error.strerror}") from None
    with file:
        if not _try_lock(file.fileno()):
            raise CheckpointError(f"another process is completing a checkpoint in {output_dir}")
        yield


def _wait_for_writer(output_dir: Path) -> None:
    if not (output_dir / _WRITER).exists():
        return
    with (output_dir / _WRITER).open("a") as file:
        if not _try_lock(file.fileno()):
            logger.info(f"waiting until the last checkpoint of the earlier run in {output_dir} is written")
            fcntl.lockf(file, fcntl.LOCK_EX)


def _try_lock(file: int) -> bool:
    """Return whether this process has the lock now, or the file system has no locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        if error.errno not in _NO_LOCKS:
            raise
    return True


def is_locked(output_dir: Path) -> bool:
    """Return whether a run of another process has `output_dir`. Nothing is locked, so no run that starts is disturbed.

    Only Linux can be asked; elsewhere the answer is no.
    """
    if sys.platform != "linux":
        return False
    asked = struct.pack("@hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)  # `struct flock`: kind, whence, start, length, process
    try:
        with (output_dir / _RUN).open("rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, asked)
    except OSError:  # there is none, or the file system has no locks
        return False
    kind: int = struct.unpack_from("@h", answer)[0]
    return kind != fcntl.F_UNLCK

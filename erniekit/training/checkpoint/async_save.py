"""Save a checkpoint synchronously, or through shared memory and another process while training goes on."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol

from safetensors import SafetensorError

import erniekit
from erniekit.environment import available_memory
from erniekit.errors import CheckpointError
from erniekit.temp_folders import TempFolder, new_temp_folder, remove_abandoned
from erniekit.training.checkpoint.atomic_folder import disk_errors, prune, temp_folder_of, write_folder

logger = logging.getLogger(__name__)

# Staging folders: a checkpoint waits in shared memory for the process that completes it. The next run of the same user
# removes folders without a holder. Needs no Paddle.

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "erniekit-checkpoint-"
_OTHER_FILES = 64 << 20  # bytes: a checkpoint's files other than tensors, mostly the tokenizer's
_HEADROOM = 1.05


def memory_shortage(tensor_bytes: int, shared_memory: Path | None = None) -> str:
    """Return why a checkpoint with so many bytes of tensors cannot wait in shared memory; "" if it can."""
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


def new_staging(shared_memory: Path | None = None) -> TempFolder:
    """Create an empty folder in shared memory, for this user only."""
    return new_temp_folder(_PREFIX, shared_memory or SHARED_MEMORY)


def remove_abandoned_staging(shared_memory: Path | None = None) -> None:
    """Remove this user's folders that no process holds: those of runs whose processes were all killed."""
    for folder in remove_abandoned(_PREFIX, shared_memory or SHARED_MEMORY):
        logger.info(f"removed {folder}: a checkpoint that a killed run had not written")


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


Write = Callable[[Path], None]  # writes the files of a checkpoint into a folder


class Saver(Protocol):
    """Writes a run's checkpoints, on the rank that writes. As a context manager around the run it completes every
    checkpoint before the run ends, or raises.

    Attributes:
        is_async: whether another process hashes and syncs.
    """

    @property
    def is_async(self) -> bool: ...
    @property
    def writing(self) -> Path | None:
        """The checkpoint that is not complete yet."""
        ...

    def save(self, target: Path, write: Write | None, tensor_bytes: int, keep: Collection[Path]) -> None:
        """Save a checkpoint; the values are copied before this returns. Afterwards, older checkpoints beyond `limit`
        are removed.

        Args:
            write: None: the checkpoint is already complete.
            tensor_bytes: about the number of bytes that `write` will write.
            keep: checkpoints that stay, in addition to the new one.

        Raises:
            CheckpointError: this checkpoint, or the one before, could not be written.
        """
        ...

    def check(self) -> None:
        """Finish a checkpoint that has become complete; never wait. Raises CheckpointError like `save`."""
        ...

    def wait(self) -> None:
        """Wait until the checkpoint in progress is complete. Raises CheckpointError like `save`."""
        ...

    def __enter__(self) -> Saver: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class SyncSaver:
    """Writes while training waits.

    Args:
        limit: number of newest checkpoints to keep; None: all.
        saved: called with each complete checkpoint.
    """

    is_async = False
    writing: Path | None = None

    def __init__(self, limit: int | None = None, saved: Callable[[Path], None] = lambda folder: None) -> None:
        self._limit, self._saved = limit, saved

    def save(self, target: Path, write: Write | None, tensor_bytes: int, keep: Collection[Path]) -> None:
        if write is not None:
            write_folder(target, write)
        prune(target.parent, self._limit, {target, *keep})
        self._saved(target)

    def check(self) -> None:
        """Do nothing: every save is complete when it returns."""

    def wait(self) -> None:
        """Do nothing: every save is complete when it returns."""

    def __enter__(self) -> SyncSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


SYNC_SAVER = SyncSaver()


class AsyncSaver:
    """Writes into shared memory while training waits; another process does the rest (`writer_process`).

    If shared memory is too small, the files are written to the disk directly, and that process hashes and syncs them.

    Args:
        limit, saved: as for `SyncSaver`; `saved` is called by `check`, `wait` or the next `save`.
        shared_memory: False if some writing ranks do not see this machine's shared memory.
    """

    is_async = True

    def __init__(
        self,
        limit: int | None,
        saved: Callable[[Path], None],
        *,
        shared_memory: bool = True,
    ) -> None:
        self._limit, self._saved, self._shared_memory = limit, saved, shared_memory
        self._process: subprocess.Popen[str] | None = None
        self._staged: Path | None = None
        self._reported: set[str] = set()
        self.writing: Path | None = None

    def save(self, target: Path, write: Write | None, tensor_bytes: int, keep: Collection[Path]) -> None:
        self.wait()
        if write is None:
            prune(target.parent, self._limit, {target, *keep})
            self._saved(target)
            return
        several = "several machines write, which do not share memory"
        shortage = memory_shortage(tensor_bytes) if self._shared_memory else several
        if shortage and shortage not in self._reported:
            self._reported.add(shortage)
            logger.info(
                f"async_save: {shortage}: the checkpoint is written to the disk, and completed in the background"
            )
        staging = None if shortage else new_staging()
        try:
            self._start(target, staging)
            with ExitStack() as undo:
                undo.callback(self._cancel)
                self._write_files(target, write, staging)
                undo.pop_all()
            self._send_request({target, *keep})
        finally:
            if staging is not None:
                staging.close()

    def check(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            self.wait()

    def wait(self) -> None:
        if self._process is None or self.writing is None:
            return
        _, said = self._process.communicate()
        code, target, staged = self._process.returncode, self.writing, self._staged
        self._process = self.writing = self._staged = None
        if code == 0:
            self._saved(target)
            return
        for folder in (staged, temp_folder_of(target)):  # in case the process could not clean up
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        if code < 0:
            said = (
                f"could not write {target}: the process that wrote it was ended by {signal.Signals(-code).name}, "
                "perhaps because memory ran out.\n  Earlier checkpoints are unchanged."
            )
        raise CheckpointError(said.strip() or f"could not write {target}: its process ended with code {code}")

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait, unless the process must end at once: then the writer finishes alone."""
        if kind is None:
            self.wait()
        elif issubclass(kind, Exception):
            try:
                self.wait()
            except CheckpointError as own:
                logger.error(str(own))  # in addition to the error that ends the run

    def _start(self, target: Path, staging: TempFolder | None) -> None:
        flags = ["-P"] if sys.version_info >= (3, 11) else []  # do not import from the current folder
        source = str(Path(erniekit.__file__).parents[1])
        path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._staged = None if staging is None else staging.folder
        self._process = subprocess.Popen(
            [
                *(sys.executable, *flags, "-m", "erniekit.training.checkpoint.writer_process"),
                *(str(os.getpid()), str(target.absolute())),
                *([] if staging is None else [str(staging.folder)]),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            pass_fds=() if staging is None else (staging.lock,),
            start_new_session=True,  # the terminal's signals are for the trainer
        )
        self.writing = target

    def _write_files(self, target: Path, write: Write, staging: TempFolder | None) -> None:
        if staging is None:
            temp_path = temp_folder_of(target)
            with disk_errors(target, temp_path):
                shutil.rmtree(temp_path, ignore_errors=True)
                temp_path.mkdir(parents=True)
                write(temp_path)
            return
        try:
            write(staging.folder)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"could not write {target} to {staging.folder}: {error}\n  Earlier checkpoints are unchanged. "
                "Without async_save in unified_checkpoint_config it is written to the disk directly."
            ) from error

    def _send_request(self, keep: Collection[Path]) -> None:
        assert self._process is not None and self._process.stdin is not None
        request = {"keep": sorted(str(folder.absolute()) for folder in keep), "limit": self._limit}
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.close()
        except BrokenPipeError:  # `wait` reports why it has ended
            self._process.stdin = None
            self.wait()
            raise
        self._process.stdin = None

    def _cancel(self) -> None:
        """End the process before it gets its request; it removes the files."""
        assert self._process is not None
        process, self._process, self.writing, self._staged = self._process, None, None, None
        process.communicate()

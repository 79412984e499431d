"""Upload what a run leaves in its local folder to an object store, in a thread, while the run goes on.

The thread looks at the folder twice a second. Whatever is complete there, which its manifest says, goes up: the
newest checkpoint first, then the model, then logs and results. It works on hard links, so that a checkpoint which
`save_total_limit` removes meanwhile still arrives whole. What fails is tried again, and stays here. Nothing goes up
before the run has begun to train: until then it may still be refused. Needs no Paddle.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from pathlib import Path
from typing import NamedTuple

from erniekit.hub.object_store import ObjectFolder, StoreError
from erniekit.manifest import MANIFEST, read_manifest
from erniekit.model.storage.model_folder import PUBLISHING
from erniekit.training.checkpoint.atomic_folder import checkpoint_folders
from erniekit.training.checkpoint.resume import CONFIG_FILE
from erniekit.training.checkpoint.stored import remove_stored, stored_checkpoints, surplus, upload_folder
from erniekit.training.checkpoint.stored_start import StoredStart, read_record, renewed, write_record
from erniekit.training.control import CONTROL_FILE

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5  # from one look at the folder to the next
FILES_SECONDS = 30.0  # from one upload of logs and results to the next
RETRY_SECONDS = 60.0  # after a failure that several attempts have not overcome
MODEL = ""  # the name of the model in the folder itself
_SNAPSHOTS = ".uploading"  # beside the local folder

_Stamp = tuple[int, int, int]  # of a file: another one after each change


class Progress(NamedTuple):
    """What has arrived, each with the stamp that it had here."""

    folders: dict[str, _Stamp]
    files: dict[str, _Stamp]


class AnotherWriterError(StoreError):
    """Another process has begun to write to the same place."""


class Uploads:
    """The uploads of a run; see above.

    Args:
        folder: the local folder of the run.
        start: what is replaced when training begins; None: the command does not train, and uploads the files that it
            changes.
        limit: how many checkpoints are kept; None: all.
    """

    def __init__(self, store: ObjectFolder, folder: Path, start: StoredStart | None, limit: int | None = None) -> None:
        self._store, self._folder, self._start, self._limit = store, folder, start, limit
        self._snapshots = folder.with_name(_SNAPSHOTS)
        self._arrived = Progress({}, {} if start is not None else dict(_loose_files(folder)))
        self._before = _stamp(folder / CONFIG_FILE)
        self._is_claimed = False
        self._files_at = -FILES_SECONDS  # when logs and results went up last
        self._told = ""  # the last failure
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="erniekit-uploads", daemon=True)

    def begin(self) -> None:
        """Start the thread."""
        shutil.rmtree(self._snapshots, ignore_errors=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until all that is complete here has arrived.

        Raises:
            StoreError: something has not; says what, and where it is.
        """
        self._stop.set()
        if self._thread.is_alive() and (waiting := self.missing()):
            logger.info(f"waiting until {_listed(waiting)} {_is(waiting)} uploaded to {self._store.url}")
        if self._thread.ident is not None:
            self._thread.join()
        try:
            self.upload(last=True)
        except (StoreError, OSError) as error:
            raise StoreError(f"{error}\n  {self._what_is_missing()}") from None
        finally:
            shutil.rmtree(self._snapshots, ignore_errors=True)
        if self._has_begun():
            logger.info(f"everything is in {self._store.url}")

    def abandon(self) -> None:
        """Stop without waiting, because the process has to end; say what has not arrived."""
        self._stop.set()
        if self.missing():
            logger.warning(self._what_is_missing())

    def missing(self) -> list[str]:
        """Return what is complete here and has not arrived: names of checkpoints, "the model"."""
        return [_title(name) for name in self._waiting()] if self._has_begun() and self._start is not None else []

    def upload(self, *, last: bool = False) -> None:
        """Upload what is complete and has not arrived.

        Args:
            last: logs and results, too, however soon after the last time.

        Raises:
            StoreError: the store fails; calling this again goes on.
        """
        if not self._has_begun():
            return
        waiting = self._waiting() if self._start is not None else []
        if self._start is not None and not self._is_claimed:
            self._claim(self._start)
        if last or waiting or time.monotonic() - self._files_at >= FILES_SECONDS:
            self._refuse_other_writer()
            self._upload_files()  # before a checkpoint, so that who goes on from there has the log until then
        for name in waiting:
            self._refuse_other_writer()
            self._upload_folder(name)
        if waiting or last:
            self._prune()

    def _run(self) -> None:
        wait = 0.0
        while not self._stop.wait(wait):
            try:
                self.upload()
                self._told, wait = "", LOOK_SECONDS
            except AnotherWriterError as error:  # `finish` says it again
                logger.error(str(error))
                return
            except (StoreError, OSError) as error:
                if str(error) != self._told:
                    logger.warning(f"{error}\n  It is tried again; {self._folder} keeps everything.")
                self._told, wait = str(error), RETRY_SECONDS

    def _has_begun(self) -> bool:
        """Whether the run has passed all checks: then it writes its configuration anew."""
        return self._start is None or _stamp(self._folder / CONFIG_FILE) != self._before

    def _claim(self, start: StoredStart) -> None:
        """Remove what this run replaces, and give the store's folder its name."""
        self._refuse_other_writer()
        self._start = renewed(start, self._folder)
        if self._start is not start:
            write_record(self._store, self._start.record)
        present = self._store.list()
        for name in start.replaced:
            logger.info(f"overwrite_output_dir: removing {_title(name)} in {self._store.url}")
            remove_stored(self._store, name, present)
        for name in start.results:
            self._store.remove(name)
        self._start = self._start._replace(replaced=(), results=())
        self._is_claimed = True

    def _refuse_other_writer(self) -> None:
        record = read_record(self._store)
        if self._start is not None and record is not None and record.writer != self._start.record.writer:
            raise AnotherWriterError(
                f"{self._store.url}: another run has begun to write there since this one began\n"
                f"  This one uploads nothing more; end one of the two. What this one has made is in {self._folder}."
            )

    def _waiting(self) -> list[str]:
        """Return the names of complete folders that have not arrived, the newest checkpoint first."""
        exports = [path for path in self._folder.glob("export-*") if path.is_dir()]
        found = {path.name: path for path in (*reversed(checkpoint_folders(self._folder)), *sorted(exports))}
        if not (self._folder / PUBLISHING).exists():
            found[MODEL] = self._folder
        stamps = {name: _stamp(path / MANIFEST) for name, path in found.items()}
        return [name for name, stamp in stamps.items() if stamp and stamp != self._arrived.folders.get(name)]

    def _upload_folder(self, name: str) -> None:
        folder, snapshot = self._folder / name, self._snapshots / (name or "model")
        stamp = _stamp(folder / MANIFEST)
        try:
            source = _snapshot(folder, snapshot)
        except FileNotFoundError:  # it has just been removed, or is being replaced: the next look tells
            return
        started, sizes = time.monotonic(), list[int]()
        upload_folder(self._store, name, source, self._store.list(name), sizes.append)
        shutil.rmtree(snapshot, ignore_errors=True)
        if stamp is not None:
            self._arrived.folders[name] = stamp
        if sizes:
            took = f"{len(sizes)} files, {sum(sizes) / 1e6:,.1f} MB, {time.monotonic() - started:.1f} s"
            logger.info(f"uploaded {_title(name)} to {self._store.url} ({took})")

    def _prune(self) -> None:
        if not self._limit or self._start is None:
            return
        present, here = self._store.list(), [path.name for path in checkpoint_folders(self._folder)]
        for name in surplus(stored_checkpoints(self._store, present), here, self._limit):
            remove_stored(self._store, name, present)

    def _upload_files(self) -> None:
        """Upload logs, results and whatever else is new and belongs to no complete folder."""
        for name, stamp in _loose_files(self._folder).items():
            if stamp == self._arrived.files.get(name):
                continue
            try:
                self._store.upload(self._folder / name, name)
            except FileNotFoundError:
                continue
            self._arrived.files[name] = stamp
        self._files_at = time.monotonic()

    def _what_is_missing(self) -> str:
        missing = self.missing()
        what = f"not uploaded: {_listed(missing)}" if missing else "logs or results are not uploaded"
        return (
            f"{self._store.url}: {what}. All of it is complete in {self._folder}.\n"
            "  The same command with resume_from_checkpoint=true uploads it first, on this machine."
        )


def _snapshot(folder: Path, target: Path) -> Path:
    """Link the files of a complete folder into another one, and return that; `folder` itself where links are refused.

    Raises:
        FileNotFoundError: a file is no longer there, or the folder has been replaced meanwhile.
    """
    shutil.rmtree(target, ignore_errors=True)
    before = (folder / MANIFEST).read_bytes()
    for name in (*read_manifest(folder / MANIFEST), MANIFEST):
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(folder / name, place)
        except FileNotFoundError:
            raise
        except OSError:
            return folder
    if (folder / MANIFEST).read_bytes() != before:
        raise FileNotFoundError(folder)
    return target


def _loose_files(folder: Path) -> dict[str, _Stamp]:
    """Return the files that belong to no complete folder and are no work in progress, with their stamps."""
    model = read_manifest(folder / MANIFEST)
    sealed = {path.parent.name for path in folder.glob(f"*/{MANIFEST}")} | {p.name for p in checkpoint_folders(folder)}
    found = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in relative.parts)
        if hidden or relative.parts[0] in sealed or str(relative) in (*model, MANIFEST, CONTROL_FILE):
            continue
        if path.is_file() and not path.is_symlink() and (stamp := _stamp(path)):
            found[relative.as_posix()] = stamp
    return found


def _stamp(path: Path) -> _Stamp | None:
    """Return what changes with a file; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _title(name: str) -> str:
    return name or "the model"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"

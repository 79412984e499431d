"""Where a run starts whose output folder is one of an object store, and which run that folder belongs to.

`erniekit-run.json` in the store names the run and the process that writes. The run's name is also beside the local
folder, which may be left from an earlier run in the same place: such a folder is set aside, so that its checkpoints are
not taken for those of the present run. A process that finds another writer there knows that it is no longer the one.
Needs no Paddle.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from erniekit.errors import CheckpointError, ModelFileError
from erniekit.hub.fetched import RUN_FILE
from erniekit.hub.object_store import ObjectFolder
from erniekit.json_files import read_json_object
from erniekit.manifest import MANIFEST, problems
from erniekit.training.callbacks.files import LOG_FILE, LOSS_CURVE_FILE, RESULT_FILES
from erniekit.training.checkpoint.atomic_folder import checkpoint_folders, newest_complete, step_of
from erniekit.training.checkpoint.manifest import atomic_write_text
from erniekit.training.checkpoint.stored import Listing, fetch_checkpoint, stored_checkpoints, upload_folder

logger = logging.getLogger(__name__)

_STATE_FILE = "trainer_state.json"  # of checkpoints, see training/checkpoint/state.py
_NAMES_SHOWN = 4


class RunRecord(NamedTuple):
    """What `erniekit-run.json` says: the run, and the process that writes it."""

    run: str
    writer: str


class StoredStart(NamedTuple):
    """What a run replaces in the store, once it begins to train.

    Attributes:
        record: of this run and this process.
        replaced: folders that are removed then; "" stands for the model.
        results: files of results that are removed then.
    """

    record: RunRecord
    replaced: tuple[str, ...] = ()
    results: tuple[str, ...] = ()


def open_stored_run(
    store: ObjectFolder,
    folder: Path,
    *,
    resume: str | bool | None,
    overwrite: bool,
    with_best: bool = False,
    several_machines: bool = False,
) -> StoredStart:
    """Bring what the run starts from into its local folder, and become the one that writes to the store.

    Args:
        folder: the local folder of the run.
        resume: as `resume_from_checkpoint`; a checkpoint of this run by its path in `folder`.
        overwrite: allow other runs' checkpoints and models to be removed when training begins.
        with_best: fetch the best checkpoint, too, which the end of the run may need.
        several_machines: other machines fetch the checkpoint, so it has to be in the store first.

    Raises:
        StoreError: the store cannot be read or written.
        CheckpointError: the store holds another run, or the checkpoint to resume from is not there.
    """
    record, present = read_record(store), store.list()
    _set_aside_other_run(folder, record)
    folder.mkdir(parents=True, exist_ok=True)
    stored = stored_checkpoints(store, present)
    mine = RunRecord(record.run if record else _local_run(folder) or secrets.token_hex(8), secrets.token_hex(8))
    start = StoredStart(mine)
    named = Path(resume) if isinstance(resume, str) else None
    before, checkpoint = set(checkpoint_folders(folder)), ""
    if resume is True:
        checkpoint = _bring_newest(store, folder, stored, present)
    elif named is not None and named.parent == folder:
        checkpoint = named.name
        start = _resume_named(store, folder, checkpoint, stored, start, overwrite=overwrite)
    if checkpoint:
        if folder / checkpoint not in before:
            _bring_results(store, folder, present)
        if with_best:
            _bring_best(store, folder, checkpoint, stored, present)
        if several_machines:
            upload_folder(store, checkpoint, folder / checkpoint, present)
    else:
        start = _start_afresh(store, present, stored, start, overwrite=overwrite)
    write_record(store, start.record)
    _write_local_run(folder, start.record.run)
    return start


def renewed(start: StoredStart, folder: Path) -> StoredStart:
    """Return the start under a name of its own, if it replaces a run; written beside the local folder."""
    if "" not in start.replaced and not start.results:
        return start
    record = start.record._replace(run=secrets.token_hex(8))
    _write_local_run(folder, record.run)
    return start._replace(record=record)


def read_record(store: ObjectFolder) -> RunRecord | None:
    """Return which run the store's folder belongs to; None if it says nothing."""
    content = store.read(RUN_FILE)
    try:
        stored = json.loads(content or b"")
        return RunRecord(str(stored["run"]), str(stored["writer"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def write_record(store: ObjectFolder, record: RunRecord) -> None:
    """Say in the store which run its folder belongs to, and that this process writes."""
    store.write(RUN_FILE, json.dumps(record._asdict()).encode())


def bring_checkpoint(store: ObjectFolder, folder: Path, name: str) -> None:
    """Download a checkpoint into the local folder of a run, if it is not there.

    Raises:
        CheckpointError: it is not complete in the store, or not what was written.
    """
    if not problems(folder / name, hashes=False):
        return
    folder.mkdir(parents=True, exist_ok=True)
    present = store.list()
    if f"{name}/{MANIFEST}" not in present:
        raise CheckpointError(
            f"resume_from_checkpoint: {store.url}/{name} is not complete: it has no {MANIFEST}, which is uploaded last."
            f"{_held(stored_checkpoints(store, present))}"
        )
    logger.info(f"downloading {store.url}/{name}")
    if found := fetch_checkpoint(store, name, folder / name, present):
        raise CheckpointError(f"resume_from_checkpoint: {store.url}/{name} cannot be used: {'; '.join(found[:3])}")


def _bring_newest(store: ObjectFolder, folder: Path, stored: Sequence[str], present: Listing) -> str:
    """Return the name of the newest complete checkpoint, which is then here; "" if there is none."""
    here, _ = newest_complete(folder)
    for name in reversed(stored):
        if here is not None and step_of(here) >= step_of(Path(name)):
            break
        logger.info(f"downloading {store.url}/{name}")
        if not (found := fetch_checkpoint(store, name, folder / name, present)):
            return name
        logger.info(f"skipped {store.url}/{name}: {'; '.join(found[:3])}")
    return "" if here is None else here.name


def _bring_results(store: ObjectFolder, folder: Path, present: Listing) -> None:
    """Download the log and the results of a run that another machine has brought further."""
    for name in (LOG_FILE, *RESULT_FILES):
        if name in present:
            store.download(name, folder / name)


def _bring_best(store: ObjectFolder, folder: Path, checkpoint: str, stored: Sequence[str], present: Listing) -> None:
    """Download the best checkpoint so far, from which the final model may have to be taken."""
    best = _best_of(folder / checkpoint)
    if best in stored and problems(folder / best, hashes=False):
        logger.info(f"downloading {store.url}/{best}, the best checkpoint so far")
        if found := fetch_checkpoint(store, best, folder / best, present):
            logger.warning(f"{store.url}/{best} cannot be used: {'; '.join(found[:3])}")


def _best_of(checkpoint: Path) -> str:
    try:
        step = read_json_object(checkpoint / _STATE_FILE)["best"]["step"]
    except (ModelFileError, KeyError, TypeError):
        return ""
    return "" if step is None else f"checkpoint-{step}"


def _resume_named(
    store: ObjectFolder,
    folder: Path,
    name: str,
    stored: Sequence[str],
    start: StoredStart,
    *,
    overwrite: bool,
) -> StoredStart:
    """Bring the checkpoint that the user has named; those after it belong to another course of the run."""
    bring_checkpoint(store, folder, name)
    later = tuple(other for other in stored if step_of(Path(other)) > step_of(Path(name)))
    if later and not overwrite:
        raise CheckpointError(
            f"{store.url} contains checkpoints that do not lead to {name}: {_names(later)}.\n"
            "  Set overwrite_output_dir: true to have them removed, or choose another output_dir."
        )
    return start._replace(replaced=later)


def _start_afresh(
    store: ObjectFolder, present: Listing, stored: Sequence[str], start: StoredStart, *, overwrite: bool
) -> StoredStart:
    has_model = MANIFEST in present
    folders = {name.split("/")[0] for name in present if "/" in name}
    old = sorted(name for name in folders if step_of(Path(name)) >= 0)
    if (stored or has_model) and not overwrite:
        held = f"checkpoints: {_names(stored)}" if stored else "a trained model"
        resume = "resume_from_checkpoint: true to continue that run, " if stored else ""
        raise CheckpointError(
            f"{store.url} already contains {held}.\n"
            f"  Set {resume}overwrite_output_dir: true to have it removed, or choose another output_dir."
        )
    if not (old or has_model):
        return start
    results = tuple(name for name in (LOG_FILE, *RESULT_FILES, LOSS_CURVE_FILE) if name in present)
    return start._replace(replaced=("", *old), results=results)


def _set_aside_other_run(folder: Path, record: RunRecord | None) -> None:
    """Rename the local folder if it was left by another run than the one in the store."""
    own = _local_run(folder)
    if record is None or own == record.run or not folder.is_dir() or not any(folder.iterdir()):
        return
    aside = folder.with_name(f"{folder.name}.{own or 'unknown'}")
    while aside.exists():
        aside = aside.with_name(f"{aside.name}.{secrets.token_hex(2)}")
    os.rename(folder, aside)
    what = "has checkpoints" if checkpoint_folders(aside) else "has no checkpoint"
    logger.info(f"{aside}: set aside, because the store has a run that began later or elsewhere; it {what}")


def _run_path(folder: Path) -> Path:
    return folder.with_name("run.json")


def _local_run(folder: Path) -> str:
    try:
        return str(read_json_object(_run_path(folder)).get("run") or "")
    except ModelFileError:
        return ""


def _write_local_run(folder: Path, run: str) -> None:
    atomic_write_text(_run_path(folder), json.dumps({"run": run}))


def _held(stored: Sequence[str]) -> str:
    return f"\n  Complete there: {_names(stored)}." if stored else "\n  No checkpoint there is complete."


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")

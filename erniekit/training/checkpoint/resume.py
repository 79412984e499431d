"""Decide where a run starts: fresh or from which checkpoint, and whether that run is the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from erniekit.errors import CheckpointError
from erniekit.manifest import MANIFEST, problems, refuse_changed, unknown_format
from erniekit.model.storage.model_folder import refuse_half_written
from erniekit.training.callbacks.files import LOSS_CURVE_FILE, RESULT_FILES
from erniekit.training.checkpoint.async_save import remove_abandoned_staging
from erniekit.training.checkpoint.atomic_folder import (
    checkpoint_folders,
    holds_foreign_model,
    holds_model,
    newest_complete,
    remove_folder,
    remove_leftovers,
    remove_model,
    step_of,
)
from erniekit.training.checkpoint.lock import locked

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """The state that a run starts from."""

    checkpoint: Path | None  # the source of weights, optimizer state and step; None: a fresh run
    superseded: tuple[Path, ...] = ()  # checkpoints of another run, removed when training begins
    supersedes_model: bool = False  # likewise a model of another run

    @classmethod
    def broadcast(cls, found: Start | None, all_gather_object: Callable[[str], list[str]]) -> Start:
        """Broadcast the start that the first rank has found; only the first rank removes what is superseded."""
        checkpoint = all_gather_object(str(found.checkpoint or "") if found else "")[0]
        return found or cls(Path(checkpoint) if checkpoint else None)


@contextmanager
def open_output_folder(
    output_dir: Path,
    *,
    resume_from_checkpoint: str | bool | None,
    overwrite_output_dir: bool,
    model_folder: Path | None = None,
    weights_from: Path | None = None,
) -> Iterator[Start]:
    """Lock `output_dir` for this run, remove a killed run's temporary files, and find where to start.

    Args:
        resume_from_checkpoint: a checkpoint folder, or true for the newest complete one in `output_dir`.
        overwrite_output_dir: allow other runs' checkpoints and models in `output_dir` to be removed.
        model_folder: source of configuration and tokenizer.
        weights_from: source of the weights of a fresh run. Neither may be `output_dir` or a checkpoint in it, which
            this run overwrites or removes.

    Raises:
        CheckpointError: another run writes there, the checkpoint is incomplete, or starting would overwrite other runs.
        ModelFileError: a source folder was left half-written.
    """
    with locked(output_dir):
        _refuse_sources(output_dir, model_folder, weights_from)
        for leftover in remove_leftovers(output_dir):
            logger.info(f"removed {leftover}: left half-written by a run that was killed")
        remove_abandoned_staging()
        start, notes = _find_start(output_dir, resume_from_checkpoint, overwrite_output_dir, weights_from)
        for line in notes:
            logger.info(line)
        yield start


def check_output_folder(
    output_dir: Path,
    *,
    resume_from_checkpoint: str | bool | None,
    overwrite_output_dir: bool,
    model_folder: Path | None = None,
    weights_from: Path | None = None,
) -> Path | None:
    """Check what `open_output_folder` checks, as far as names and sizes of files tell; nothing is locked or changed.

    Returns:
        The checkpoint that the run resumes from; None for a fresh run.

    Raises:
        CheckpointError, ModelFileError: as for `open_output_folder`; also if `output_dir` is a file.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise CheckpointError(f"output_dir {output_dir} cannot be written: it is a file; name a folder")
    _refuse_sources(output_dir, model_folder, weights_from)
    start, _ = _find_start(output_dir, resume_from_checkpoint, overwrite_output_dir, weights_from, hashes=False)
    return start.checkpoint


def _refuse_sources(output_dir: Path, *sources: Path | None) -> None:
    for source in sources:
        if source is not None:
            _refuse_inside(source, output_dir)
            refuse_half_written(source)


def remove_superseded(output_dir: Path, start: Start) -> None:
    """Remove what overwrite_output_dir allows to be removed, and the results of the run that it belonged to.

    Called late, when all other checks have passed.
    """
    for folder in start.superseded:
        logger.info(f"overwrite_output_dir: removing {folder}")
        remove_folder(folder)
    if start.supersedes_model:
        logger.info(f"overwrite_output_dir: removing the earlier model in {output_dir}")
        remove_model(output_dir)
    if start.checkpoint is None and (start.superseded or start.supersedes_model):
        for name in (*RESULT_FILES, LOSS_CURVE_FILE):  # a fresh run starts a new log
            (output_dir / name).unlink(missing_ok=True)


def _find_start(
    output_dir: Path,
    resume: str | bool | None,
    overwrite: bool,
    weights_from: Path | None,
    *,
    hashes: bool = True,
) -> tuple[Start, list[str]]:
    """Return where to start, and what to tell about it.

    Args:
        hashes: compare the content of files with their manifest, too; otherwise names and sizes only.
    """
    notes: list[str] = []
    if resume is True:
        newest, notes = newest_complete(output_dir, hashes=hashes)
        if newest is not None:
            return _resume(newest, (), output_dir, overwrite), [*notes, f"resuming from {newest}"]
    elif resume:
        checkpoint = Path(resume).expanduser()
        return _start_from(checkpoint, output_dir, overwrite, hashes=hashes), [f"resuming from {checkpoint}"]
    start = _start_afresh(output_dir, overwrite, weights_from if hashes else None)
    if resume:
        notes.append(f"resume_from_checkpoint: true, but {output_dir} has no complete checkpoint: starting afresh")
    return start, notes


def _start_from(checkpoint: Path, output_dir: Path, overwrite: bool, *, hashes: bool) -> Start:
    _require_complete(checkpoint, hashes=hashes)
    same_run = checkpoint.resolve().parent == output_dir.resolve()
    present = checkpoint_folders(output_dir)
    others = [folder for folder in present if not same_run or step_of(folder) > step_of(checkpoint)]
    if others and not overwrite:
        raise CheckpointError(
            f"{output_dir} contains checkpoints that do not lead to {checkpoint}: {_names(others)}.\n"
            "  Set overwrite_output_dir: true to have them removed, or choose another output_dir."
        )
    return _resume(checkpoint, tuple(others), output_dir, overwrite)


def _resume(checkpoint: Path, others: tuple[Path, ...], output_dir: Path, overwrite: bool) -> Start:
    """Return the start from a checkpoint. A model published by an earlier part of the same run may be replaced."""
    same_run = checkpoint.resolve().parent == output_dir.resolve()
    foreign = holds_foreign_model(output_dir) if same_run else bool(holds_model(output_dir))
    if foreign and not overwrite:
        raise CheckpointError(
            f"{output_dir} contains {holds_model(output_dir)}, which does not belong to the run of {checkpoint}.\n"
            "  Set overwrite_output_dir: true to have it removed, or choose another output_dir."
        )
    return Start(checkpoint, others, foreign)


def _start_afresh(output_dir: Path, overwrite: bool, weights_from: Path | None) -> Start:
    present, model = checkpoint_folders(output_dir), holds_model(output_dir)
    if (present or model) and not overwrite:
        held = f"checkpoints: {_names(present)}" if present else model
        complete = any(not problems(folder, hashes=False) for folder in present)
        resume = "resume_from_checkpoint: true to continue that run, " if complete else ""
        raise CheckpointError(
            f"{output_dir} already contains {held}.\n"
            f"  Set {resume}overwrite_output_dir: true to have it removed, or choose another output_dir."
        )
    if weights_from is not None:
        refuse_changed(weights_from, (path.name for path in weights_from.glob("*model*.safetensors")))
    return Start(None, tuple(present), bool(model))


def _refuse_inside(source: Path, output_dir: Path) -> None:
    if source.resolve() in {folder.resolve() for folder in (output_dir, *checkpoint_folders(output_dir))}:
        raise CheckpointError(
            f"the run reads its model from {source}, which writing to output_dir {output_dir} would overwrite "
            "or remove.\n  Choose another output_dir."
        )


def _require_complete(checkpoint: Path, *, hashes: bool) -> None:
    if not checkpoint.is_dir():
        raise CheckpointError(f"resume_from_checkpoint: there is no folder {checkpoint}")
    if step_of(checkpoint) < 0:
        inside = _names(checkpoint_folders(checkpoint))
        hint = f" It contains {inside}." if inside else ""
        raise CheckpointError(f"resume_from_checkpoint: {checkpoint} is not a checkpoint-<step> folder.{hint}")
    found = problems(checkpoint, hashes=hashes)
    if found:
        what = "cannot be resumed from" if unknown_format(checkpoint / MANIFEST) else "is not complete"
        raise CheckpointError(f"resume_from_checkpoint: {checkpoint} {what}: {'; '.join(found[:5])}")


def _names(folders: list[Path]) -> str:
    return ", ".join(folder.name for folder in folders[:4]) + (", ..." if len(folders) > 4 else "")


# The settings that a resumed run must share with the interrupted one, and the messages about differences.

IDENTITY_FILE = "run_identity.json"  # of a checkpoint
CONFIG_FILE = "training_config.yaml"  # of a checkpoint, and of an output folder, which gets it when training begins
_ROWS, _MICRO_BATCHES = "per_device_train_batch_size", "gradient_accumulation_steps"
_DISPLAY_NAMES = {_MICRO_BATCHES: "gradient_accumulation_steps (times the data-parallel ranks)"}
_UNSAID = {"precision": "float32"}  # settings that are recorded only where they have another value


@dataclass(frozen=True)
class RunIdentity:
    """The settings of a run. Seed, data and batches determine the samples of each step; the others except the base
    determine the last bits."""

    seed: int
    data_fingerprint: str
    batches: Mapping[str, Any]  # parameter name -> value, of every parameter that shapes the batches
    cpu_settings: Mapping[str, str]
    versions: Mapping[str, str]  # package -> version
    base_weights: str = ""  # fingerprint of the frozen weights under adapters

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], path: Path) -> RunIdentity:
        try:
            identity = cls(**stored)
            # Earlier versions had no kernels of their own, and stored this setting, which changes no bits.
            settings = {"cpu_kernels": "paddle", **identity.cpu_settings}
            return replace(identity, cpu_settings={key: settings[key] for key in settings if key != "KMP_BLOCKTIME"})
        except TypeError as error:
            raise CheckpointError(f"{path}: not an identity of this version ({error})") from None


def check_identity(stored: RunIdentity, own: RunIdentity, folder: Path) -> list[str]:
    """Compare the run that wrote `folder` with the one that resumes from it.

    Returns:
        Warnings about differences that change rounding, and about another NumPy, which may change the order of samples.

    Raises:
        CheckpointError: the frozen weights, or the samples of the remaining steps, differ from the interrupted run's.
    """
    if stored.base_weights != own.base_weights:
        raise CheckpointError(
            f"cannot resume from {folder}: its adapters were trained on top of other weights than those of this run's "
            f"base model (fingerprint was {stored.base_weights or 'none'}, is {own.base_weights or 'none'}).\n"
            "  Put the old base model back (model_name_or_path, or init_from_checkpoint), or start a new run from the "
            f"adapters: lora_path: {folder}, with another output_dir."
        )
    differences = [] if stored.seed == own.seed else [f"seed was {stored.seed}, is {own.seed}"]
    if stored.data_fingerprint != own.data_fingerprint:
        differences.append(
            "the training data, the tokenizer or the chat template changed "
            f"(fingerprint was {stored.data_fingerprint}, is {own.data_fingerprint})"
        )
    rows = _rows_per_step(own.batches)
    redivided = rows is not None and rows == _rows_per_step(stored.batches)
    shape = (_ROWS, _MICRO_BATCHES) if redivided else ()
    differences += _changed(*(_without(shape, batches) for batches in (stored.batches, own.batches)))
    if differences:
        raise CheckpointError(
            f"cannot resume from {folder}: the remaining steps would train on other samples.\n"
            + "".join(f"  - {difference}\n" for difference in differences)
            + "  Put the old values back, or start a new run from its weights: set "
            f"init_from_checkpoint: {folder} instead of resume_from_checkpoint, with another output_dir."
        )
    warnings = []
    if redivided and stored.batches[_ROWS] != own.batches[_ROWS]:
        warnings.append(
            "resuming is not bit-exact: the samples of each step are the same, in micro-batches of "
            f"{own.batches[_ROWS]} rows now, not of {stored.batches[_ROWS]}: sums are rounded in another order, and "
            "dropout draws other numbers"
        )
    changed = _changed(stored.cpu_settings, own.cpu_settings) + _changed(stored.versions, own.versions)
    warnings += [f"resuming is not bit-exact: {change}" for change in changed]
    if stored.versions.get("numpy") != own.versions.get("numpy"):
        warnings.append(
            "the samples are ordered with NumPy's random numbers, which another version of NumPy may draw differently: "
            "if it does, the rest of this epoch repeats some samples and misses others"
        )
    return warnings


def _rows_per_step(batches: Mapping[str, Any]) -> int | None:
    """Return the rows of all micro-batches of a step together; None if a step is not counted in rows."""
    if batches.get("batch_tokens") or not {_ROWS, _MICRO_BATCHES} <= batches.keys():
        return None
    return int(batches[_ROWS]) * int(batches[_MICRO_BATCHES])


def _without(names: Collection[str], batches: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batches.items() if name not in names}


def _changed(stored: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    names = [name for name in {**stored, **own} if stored.get(name) != own.get(name)]
    was, now = ({**_UNSAID, **settings} for settings in (stored, own))
    return [f"{_DISPLAY_NAMES.get(name, name)} was {was.get(name)}, is {now.get(name)}" for name in names]

"""What must stay the same for a resumed run to continue the interrupted one, and what is said when it did not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from erniekit.errors import CheckpointError

_ROWS, _MICRO_BATCHES = "per_device_train_batch_size", "gradient_accumulation_steps"
_DISPLAY_NAMES = {_MICRO_BATCHES: "gradient_accumulation_steps (times the ranks that read different data)"}


@dataclass(frozen=True)
class RunIdentity:
    """Seed, data and batches decide which samples step k sees; the rest, the base aside, decides the last bits."""

    seed: int
    data_fingerprint: str
    batches: Mapping[str, Any]  # parameter name -> value, of every parameter that shapes the batches
    cpu_settings: Mapping[str, str]
    versions: Mapping[str, str]  # package -> version
    base_weights: str = ""  # fingerprint of the frozen weights beside adapters

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], path: Path) -> RunIdentity:
        try:
            return cls(**stored)
        except TypeError as error:
            raise CheckpointError(f"{path}: not an identity of this version ({error})") from None


def check_identity(stored: RunIdentity, own: RunIdentity, folder: Path) -> list[str]:
    """Compare the run that wrote `folder` with the one that resumes from it.

    Returns:
        Warnings: differences that change rounding, and another NumPy, which may change the order of samples.

    Raises:
        CheckpointError: the frozen weights, or the samples of the remaining steps, are not the interrupted run's.
    """
    if stored.base_weights != own.base_weights:
        raise CheckpointError(
            f"cannot resume from {folder}: its adapters were trained beside other weights than those of this run's "
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
    """How many rows all micro-batches of a step have together; None where rows are not what a step is counted in."""
    if batches.get("batch_tokens") or not {_ROWS, _MICRO_BATCHES} <= batches.keys():
        return None
    return int(batches[_ROWS]) * int(batches[_MICRO_BATCHES])


def _without(names: Collection[str], batches: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batches.items() if name not in names}


def _changed(stored: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    names = [name for name in {**stored, **own} if stored.get(name) != own.get(name)]
    return [f"{_DISPLAY_NAMES.get(name, name)} was {stored.get(name)}, is {own.get(name)}" for name in names]

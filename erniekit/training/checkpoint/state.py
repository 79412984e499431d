"""Write and read training checkpoints: safetensors and JSON only.

checkpoint-{step}/
  (model files)              written by the caller: config.json, model*.safetensors, tokenizer; loadable like any model
  optimizer*.safetensors     AdamW's state as `<parameter>/<kind>`, moments perhaps quantized (see quantized_state);
                             absent with ignore_save_lr_and_optim
  beside_model*.safetensors  the objective's extra state: the reference of a preference loss, or absent
  trainer_state.json         integers and running sums: the run's progress
  ranks.json, rank-00000/ .. each rank's shard, instead of the above (see sharded)
  run_identity.json          settings that must be the same to continue the run bit for bit
  training_config.yaml       the resolved configuration
  manifest.json              sizes and hashes of all files

No random-generator state: every draw is seeded from (seed, step, micro-batch, layer). No learning rate: it is a
function of the step. No data state: the plan is a function of the step.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from paddle import Tensor

from erniekit.config.values import format_value
from erniekit.errors import CheckpointError, ModelFileError
from erniekit.json_files import read_json_object
from erniekit.manifest import MANIFEST, problems
from erniekit.model.local_tensors import FullTensors, LocalTensors, SingleProcessTensors, local_tensors
from erniekit.model.storage.model_folder import RANKS_FILE
from erniekit.training.checkpoint.async_save import SYNC_SAVER, Saver
from erniekit.training.checkpoint.atomic_folder import checkpoint_name
from erniekit.training.checkpoint.manifest import atomic_write_text
from erniekit.training.checkpoint.master_weights import SEPARATE_MASTER_WEIGHTS, MasterWeightPolicy, load_master_weights
from erniekit.training.checkpoint.quantized_state import CompressedState, MomentFormat, decompressed, moment_format_of
from erniekit.training.checkpoint.resume import CONFIG_FILE, IDENTITY_FILE, RunIdentity
from erniekit.training.checkpoint.sharded import (
    NO_SHARDS,
    OPTIMIZER,
    WEIGHTS,
    CheckpointShards,
    check_same_layout,
    local_shard_of,
    sharded_kinds,
    write_shards,
)
from erniekit.training.checkpoint.tensors import TensorFiles, open_tensors, write_tensors
from erniekit.training.collectives import SINGLE_PROCESS, Ranks
from erniekit.training.control import Command
from erniekit.training.early_stopping import BestSoFar
from erniekit.training.gradients import LossScale
from erniekit.training.metrics import Totals
from erniekit.training.optim.adamw import (
    full_optimizer_tensors,
    load_local_optimizer_state,
    load_optimizer_state,
    local_optimizer_state,
)

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
_TRAINER_FILES = (
    "optimizer*.safetensors", "beside_model*.safetensors", STATE_FILE, IDENTITY_FILE, CONFIG_FILE, MANIFEST, RANKS_FILE,
)  # fmt: skip
_START_PARAMETERS = {"resume_from_checkpoint", "init_from_checkpoint", "overwrite_output_dir"}


@dataclass
class TrainerState:
    """The run's progress. The sums make the logged metrics of a resumed run equal those of an uninterrupted one."""

    step: int = 0  # finished updates
    epoch: float = 0.0
    since_log: Totals = field(default_factory=Totals)
    whole_run: Totals = field(default_factory=Totals)
    best: BestSoFar = field(default_factory=BestSoFar)
    loss_scale: LossScale | None = None  # of a float16 run
    learning_rate: float | None = None  # set by the user, instead of the schedule's
    events: list[Command] = field(default_factory=list)  # what the user wants after later steps

    @property
    def choices(self) -> dict[str, Any]:
        """What the user has chosen while the run trained, by the command that chooses it."""
        scale = None if self.loss_scale is None else self.loss_scale.scale
        return {"lr": self.learning_rate, "loss_scale": scale, "COMMAND@STEP": tuple(self.events)}


def save_checkpoint(
    output_dir: Path,
    state: TrainerState,
    *,
    identity: RunIdentity,
    resolved_config: Mapping[str, Any],
    write_model: Callable[[Path | None], None],
    optimizer: Any,
    parameters: Mapping[str, Tensor],
    extra_state: Mapping[str, Tensor] = {},
    moments: MomentFormat | None = None,
    ranks: Ranks = SINGLE_PROCESS,
    shards: CheckpointShards = NO_SHARDS,
    master_weights: MasterWeightPolicy = SEPARATE_MASTER_WEIGHTS,
    saver: Saver = SYNC_SAVER,
    keep: Collection[Path] = (),
) -> Path:
    """Write `checkpoint-{step}`, all or nothing. If `optimizer` is None, its state is left out.

    A complete checkpoint of this step is kept: step k of a run is always the same, and replacing the folder would
    remove it for a moment.

    Args:
        write_model: called with None, it sends this rank's shards to the rank that writes.
        moments: format of quantized moments; None: not quantized.
        ranks: all of them call this; the first writes, and each its shard (`shards`).
        saver: completes the folder, perhaps after this returns.
        keep: older checkpoints that stay.

    Raises:
        CheckpointError: the disk is full or cannot be written; earlier checkpoints are unchanged.
    """

    def write_shard(shard: Path, kinds: frozenset[str]) -> None:
        if WEIGHTS in kinds:
            shards.write_model(shard)
            write_tensors(shard, "beside_model", SingleProcessTensors(local_tensors(extra_state)))
        if OPTIMIZER in kinds:
            own = SingleProcessTensors(
                master_weights.tensors_to_store(local_optimizer_state(optimizer, parameters).state)
            )
            _write_optimizer(shard, own, moments, shards.optimizer_files)

    def write(folder: Path | None) -> None:
        own = shards.kinds if optimizer is not None else shards.kinds - {OPTIMIZER}
        if WEIGHTS not in own:
            write_model(folder)
            write_tensors(folder, "beside_model", ranks.full_tensors(local_tensors(extra_state)))
        if optimizer is not None and OPTIMIZER not in own:
            _write_optimizer(
                folder,
                ranks.full_tensors(master_weights.tensors_to_store(full_optimizer_tensors(optimizer, parameters))),
                moments,
            )
        if own:
            write_shards(folder, ranks, own, lambda shard: write_shard(shard, own), seals=not saver.is_async)
        if folder is None:
            return
        (folder / STATE_FILE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
        (folder / IDENTITY_FILE).write_text(json.dumps(identity.to_json(), indent=1), encoding="utf-8")
        write_config(folder, resolved_config)

    folder = output_dir / checkpoint_name(state.step)
    if not ranks.all_gather_object(ranks.is_main_process and bool(problems(folder, hashes=True)))[0]:
        if ranks.is_main_process:
            saver.save(folder, None, 0, keep)
        return folder
    groups = [_stored_as_float32(local_tensors(parameters)), local_tensors(extra_state)]
    if optimizer is not None:
        groups.append(master_weights.tensors_to_store(full_optimizer_tensors(optimizer, parameters)))
    size = sum(_nbytes(ranks.full_tensors(group)) for group in groups)
    if ranks.is_main_process:
        saver.save(folder, write, size, keep)
    else:
        write(None)
    return folder


def load_state(folder: Path) -> TrainerState:
    """Return the progress of the run that wrote `folder`.

    Raises:
        CheckpointError: the folder is not a training checkpoint.
    """
    stored = _read_json(folder / STATE_FILE)
    try:
        stored |= {name: Totals.from_json(stored[name]) for name in ("since_log", "whole_run")}
        if "best_eval_loss" in stored:  # of versions with one metric and no patience
            stored["best"] = {"step": stored.pop("best_step"), "value": stored.pop("best_eval_loss")}
        scale = stored.get("loss_scale")
        stored["loss_scale"] = None if scale is None else LossScale(**scale)
        stored["events"] = [Command(*event) for event in stored.get("events", [])]
        return TrainerState(**{**stored, "best": BestSoFar(**stored["best"])})
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / STATE_FILE}: not a trainer state of this version ({error})") from None


def load_identity(folder: Path) -> RunIdentity:
    """Return the identity of the run that wrote `folder`."""
    return RunIdentity.from_json(_read_json(folder / IDENTITY_FILE), folder / IDENTITY_FILE)


def load_optimizer(
    folder: Path,
    optimizer: Any,
    parameters: Mapping[str, Tensor],
    ranks: Ranks = SINGLE_PROCESS,
    master_weights: MasterWeightPolicy = SEPARATE_MASTER_WEIGHTS,
) -> MomentFormat | None:
    """Set AdamW's state from `folder`, on every rank its shard; bit for bit unless moments are quantized.

    The weights have already been loaded; for float32 weights, stored master weights may give more exact values.

    Returns:
        The format of quantized moments; None: not quantized.

    Raises:
        CheckpointError: the folder has no optimizer state, that of other parameters, or an unknown format.
    """
    is_sharded = OPTIMIZER in sharded_kinds(folder)
    if is_sharded:
        check_same_layout(folder, ranks)
    stored = open_tensors(local_shard_of(folder, ranks) if is_sharded else folder, "optimizer")
    if not stored.names:
        raise CheckpointError(
            f"{folder} has no optimizer state (it was saved with ignore_save_lr_and_optim).\n"
            "  Set ignore_load_lr_and_optim: true to continue with fresh moments, which is not bit-exact."
        )
    state = decompressed(stored, folder)
    if is_sharded:
        load_local_optimizer_state(local_optimizer_state(optimizer, parameters), state.names, state.read)
    else:
        load_optimizer_state(optimizer, parameters, state.names, state.read, ranks)
    reported = load_master_weights(
        state,
        folder,
        optimizer,
        parameters,
        master_weights,
        stored_as_model="skip_save_model_weight" in (_stored_config(folder).get("unified_checkpoint_config") or ()),
        is_sharded=is_sharded,
        ranks=ranks,
    )
    if reported:
        logger.info(f"{folder}: {reported}")
    return moment_format_of(stored, folder)


def load_extra_state(folder: Path, ranks: Ranks = SINGLE_PROCESS) -> TensorFiles:
    """Return the `extra_state` given to `save_checkpoint`: on every rank its shard of each tensor."""
    if WEIGHTS in sharded_kinds(folder):
        return open_tensors(local_shard_of(folder, ranks), "beside_model")
    stored = open_tensors(folder, "beside_model")
    return stored._replace(read=lambda name: ranks.local_shard(name, stored.read(name)))


def write_config(folder: Path, resolved_config: Mapping[str, Any]) -> None:
    """Write the resolved configuration into `folder`.

    Raises:
        CheckpointError: the folder cannot be written, or the disk is full.
    """
    try:
        atomic_write_text(folder / CONFIG_FILE, _config_text(resolved_config))
    except OSError as error:
        advice = "Free some space or give yourself write permission, or choose another output_dir."
        raise CheckpointError(f"could not write {folder / CONFIG_FILE}: {error}\n  {advice}") from None


def changed_parameters(folder: Path, resolved_config: Mapping[str, Any]) -> list[str]:
    """Return `name old -> new` for every parameter that differs from the configuration stored in `folder`."""
    stored = _stored_config(folder)
    own = yaml.safe_load(_config_text(resolved_config))  # as it would be stored: tuples become lists
    names = [name for name in own if name not in _START_PARAMETERS and stored.get(name) != own[name]]
    return [f"{name} {format_value(stored.get(name))} -> {format_value(own[name])}" for name in names]


def copy_model_files(checkpoint: Path, folder: Path) -> None:
    """Copy the model files of a checkpoint, without the files that only resuming needs."""
    for path in sorted(checkpoint.iterdir()):
        if path.is_file() and not any(path.match(pattern) for pattern in _TRAINER_FILES):
            shutil.copyfile(path, folder / path.name)


def _stored_config(folder: Path) -> Mapping[str, Any]:
    config: Mapping[str, Any] = yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    return config


def _write_optimizer(folder: Path | None, state: FullTensors, moments: MomentFormat | None, files: int = 1) -> None:
    if moments is None:
        write_tensors(folder, "optimizer", state, files=files)
    else:
        compressed = CompressedState(state, moments)
        write_tensors(folder, "optimizer", compressed, compressed.metadata, files=files)


def _stored_as_float32(weights: LocalTensors) -> LocalTensors:
    """Return the specs of weights as stored: 16-bit weights are written as float32."""
    wide = {name: tensor._replace(dtype="F32") for name, tensor in weights.tensors.items() if tensor.dtype != "F64"}
    return LocalTensors({**weights.tensors, **wide}, weights.read)


def _nbytes(tensors: FullTensors) -> int:
    return sum(tensors.stored(name).nbytes for name in tensors.names)


def _config_text(resolved_config: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(resolved_config), sort_keys=False, allow_unicode=True)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except ModelFileError as error:
        raise CheckpointError(f"{error}; it is needed to resume") from None

"""Master weights, AdamW's float32 copies of 16-bit weights, in checkpoints.

A checkpoint stores them in addition to the weights, which are their rounded values; or instead of the weights, so that
each value is stored once without loss (`skip_save_model_weight`); or not at all: then a resumed run converts the
weights, which have lost precision (`remove_master_weight`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from paddle import Tensor

from erniekit.errors import CheckpointError
from erniekit.model.local_tensors import LocalTensors, to_numpy
from erniekit.training.checkpoint.tensors import TensorFiles
from erniekit.training.collectives import SINGLE_PROCESS, Ranks
from erniekit.training.optim.adamw import (
    MASTER_WEIGHT,
    full_optimizer_state,
    full_optimizer_tensors,
    is_master_weight,
    local_optimizer_state,
    without_master_weights,
)

_SUFFIX = f"/{MASTER_WEIGHT}"
MasterWeightStorage = Literal["beside", "as weights", "nowhere"]
ReadWeight = Callable[[str], np.ndarray]  # by Hugging Face name, full, in the decoder's layout


@dataclass(frozen=True)
class MasterWeightPolicy:
    """How checkpoints store master weights.

    Attributes:
        stored: in addition to the weights, instead of them, or not at all.
        compatible: accept a checkpoint without the master weights that the run needs, or with some that it does not
            need.
        open_weights: opens the weights of a checkpoint; None: use the run's weights.
    """

    stored: MasterWeightStorage = "beside"
    compatible: bool = False
    open_weights: Callable[[Path], ReadWeight] | None = None

    def tensors_to_store(self, state: LocalTensors) -> LocalTensors:
        """Return the part of an optimizer's state that is stored with it."""
        return state if self.stored == "beside" else without_master_weights(state)


SEPARATE_MASTER_WEIGHTS = MasterWeightPolicy()


def has_master_weights(optimizer: Any, parameters: Mapping[str, Tensor]) -> bool:
    """Return whether an optimizer has master weights."""
    return any(map(is_master_weight, full_optimizer_tensors(optimizer, parameters).tensors))


def master_weights_as_model(weights: LocalTensors, optimizer: Any, parameters: Mapping[str, Tensor]) -> LocalTensors:
    """Return the weights, each replaced by its master weight if there is one."""
    state = full_optimizer_tensors(optimizer, parameters)
    master = {name: f"{name}{_SUFFIX}" for name in weights.tensors if f"{name}{_SUFFIX}" in state.tensors}
    tensors = {
        name: state.tensors[master[name]] if name in master else weights.tensors[name] for name in weights.tensors
    }
    return LocalTensors(tensors, lambda name: state.read(master[name]) if name in master else weights.read(name))


def load_master_weights(
    state: TensorFiles,
    folder: Path,
    optimizer: Any,
    parameters: Mapping[str, Tensor],
    settings: MasterWeightPolicy,
    *,
    stored_as_model: bool,
    is_sharded: bool = False,
    ranks: Ranks = SINGLE_PROCESS,
) -> str:
    """Set master weights from a checkpoint's optimizer state or weights; set float32 weights from stored master
    weights.

    Args:
        state: of the optimizer, as stored.
        stored_as_model: the checkpoint has master weights instead of weights.
        is_sharded: `state` is this rank's shard.

    Returns:
        A message for the user; may be "".

    Raises:
        CheckpointError: the checkpoint has no master weights, or some that the run does not need, and the settings
            do not allow it.
    """
    full = full_optimizer_state(optimizer, parameters)
    local = local_optimizer_state(optimizer, parameters) if is_sharded else full
    here = [name.removesuffix(_SUFFIX) for name in local.state.tensors if is_master_weight(name)]
    needed = set(here) if is_sharded else {name for names in ranks.all_gather_object(here) for name in names}
    stored = {name.removesuffix(_SUFFIX) for name in state.names if is_master_weight(name)}
    missing, surplus = sorted(needed - stored), sorted(stored - needed)
    if missing and not (settings.compatible or stored_as_model or settings.stored == "nowhere"):
        raise CheckpointError(
            f"{folder} has no master weights (float32 copies of 16-bit weights), for example of {missing[0]}.\n"
            "  Set unified_checkpoint_config: [master_weight_compatible] to make them from its weights."
        )
    if surplus and not settings.compatible:
        raise CheckpointError(
            f"{folder} has master weights, for example of {surplus[0]}, and the weights of this run are float32.\n"
            "  Set unified_checkpoint_config: [master_weight_compatible] to use them as its weights, or resume "
            "with the bf16, fp16 and fp16_opt_level that wrote it."
        )
    if surplus and is_sharded and "sharding" in ranks.layout:
        raise CheckpointError(
            f"{folder} has sharded master weights, for example of {surplus[0]}, and the "
            "weights of this run are float32.\n  Resume with the bf16, fp16 and fp16_opt_level that wrote it; with "
            "unified_checkpoint: true and no ignore_merge_optimizer the next checkpoint can be resumed this way."
        )
    weights = settings.open_weights(folder) if missing and settings.open_weights else None
    for name in here:
        key = f"{name}{_SUFFIX}"
        if name in stored:
            values = state.read(key)
            local.write(key, values if is_sharded else ranks.local_shard(name, values))
        elif weights is not None:
            full.write(key, ranks.local_shard(name, weights(name)))
        else:
            with ranks.gather_params([parameters[name]]):
                values = to_numpy(parameters[name])
            full.write(key, values)
    for name in surplus:
        if name in parameters:
            values = state.read(f"{name}{_SUFFIX}")
            with ranks.gather_params([parameters[name]]):
                parameters[name].set_value(values if is_sharded else ranks.local_shard(name, values))
    if surplus:
        return "the float32 master weights of the checkpoint are the weights of this run"
    if missing and not stored_as_model:
        return "the checkpoint has no master weights: they are made from its weights, which is not bit-exact"
    return ""

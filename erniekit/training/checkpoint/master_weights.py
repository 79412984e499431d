"""The float32 copies that AdamW keeps of 16-bit weights ("master weights"), in checkpoints.

A checkpoint holds them beside the weights, which are theirs rounded; or in the place of the weights, so that a value is
stored once and nothing is lost (`skip_save_model_weight`); or not at all, and a resumed run widens the weights, which
loses what rounding took (`remove_master_weight`).
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
ReadWeight = Callable[[str], np.ndarray]  # by Hugging Face name, in the decoder's layout, whole


@dataclass(frozen=True)
class MasterWeightPolicy:
    """How checkpoints have master weights.

    Attributes:
        stored: beside the weights, in their place, or not at all.
        compatible: a checkpoint may have none where the run needs them, or some that it does not need.
        open_weights: opens the weights of a checkpoint; None: they are only known as the run has them.
    """

    stored: MasterWeightStorage = "beside"
    compatible: bool = False
    open_weights: Callable[[Path], ReadWeight] | None = None

    def tensors_to_store(self, state: LocalTensors) -> LocalTensors:
        """What of an optimizer's state is stored with it."""
        return state if self.stored == "beside" else without_master_weights(state)


SEPARATE_MASTER_WEIGHTS = MasterWeightPolicy()


def has_master_weights(optimizer: Any, parameters: Mapping[str, Tensor]) -> bool:
    """Whether an optimizer keeps any."""
    return any(map(is_master_weight, full_optimizer_tensors(optimizer, parameters).tensors))


def master_weights_as_model(weights: LocalTensors, optimizer: Any, parameters: Mapping[str, Tensor]) -> LocalTensors:
    """Weights, where there are master weights with the values of these."""
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
    """Set master weights from a checkpoint: from its optimizer state, or from its weights. Master weights of weights
    that are float32 here become these.

    Args:
        state: of the optimizer, as stored.
        stored_as_model: the checkpoint has them in the place of weights.
        is_sharded: `state` is what this rank wrote of its own.

    Returns:
        What a user is to know of it; may be empty.

    Raises:
        CheckpointError: the checkpoint has none, or the run has no use for them, and the settings do not allow it.
    """
    full = full_optimizer_state(optimizer, parameters)
    local = local_optimizer_state(optimizer, parameters) if is_sharded else full
    here = [name.removesuffix(_SUFFIX) for name in local.state.tensors if is_master_weight(name)]
    needed = set(here) if is_sharded else {name for names in ranks.all_gather_object(here) for name in names}
    stored = {name.removesuffix(_SUFFIX) for name in state.names if is_master_weight(name)}
    missing, surplus = sorted(needed - stored), sorted(stored - needed)
    if missing and not (settings.compatible or stored_as_model or settings.stored == "nowhere"):
        raise CheckpointError(
            f"{folder} holds no master weights (float32 copies of 16-bit weights), for example of {missing[0]}.\n"
            "  Set unified_checkpoint_config: [master_weight_compatible] to make them from its weights."
        )
    if surplus and not settings.compatible:
        raise CheckpointError(
            f"{folder} holds master weights, for example of {surplus[0]}, and the weights of this run are float32.\n"
            "  Set unified_checkpoint_config: [master_weight_compatible] to go on with them as its weights, or resume "
            "with the bf16, fp16 and fp16_opt_level that wrote it."
        )
    if surplus and is_sharded and "sharding" in ranks.layout:
        raise CheckpointError(
            f"{folder} holds master weights of which each rank wrote its share, for example of {surplus[0]}, and the "
            "weights of this run are float32.\n  Resume with the bf16, fp16 and fp16_opt_level that wrote it; with "
            "unified_checkpoint: true and no ignore_merge_optimizer its next checkpoint can be resumed from so."
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

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
from erniekit.model.whole import Held, values_of
from erniekit.training.optimizer import (
    MASTER_WEIGHT,
    held_state,
    is_master,
    own_state,
    whole_state,
    without_masters,
)
from erniekit.training.ranks import SINGLE, Ranks
from erniekit.training.tensor_files import TensorFiles

_SUFFIX = f"/{MASTER_WEIGHT}"
Where = Literal["beside", "as weights", "nowhere"]
ReadWeight = Callable[[str], np.ndarray]  # by Hugging Face name, in the decoder's layout, whole


@dataclass(frozen=True)
class MasterWeights:
    """How checkpoints have master weights.

    Attributes:
        stored: beside the weights, in their place, or not at all.
        compatible: a checkpoint may have none where the run needs them, or some that it does not need.
        weights_of: opens the weights of a checkpoint; None: they are only known as the run has them.
    """

    stored: Where = "beside"
    compatible: bool = False
    weights_of: Callable[[Path], ReadWeight] | None = None

    def to_store(self, state: Held) -> Held:
        """What of an optimizer's state is stored with it."""
        return state if self.stored == "beside" else without_masters(state)


BESIDE = MasterWeights()


def has_masters(optimizer: Any, parameters: Mapping[str, Tensor]) -> bool:
    """Whether an optimizer keeps any."""
    return any(map(is_master, held_state(optimizer, parameters).tensors))


def in_place_of_weights(weights: Held, optimizer: Any, parameters: Mapping[str, Tensor]) -> Held:
    """Weights, where there are master weights with the values of these."""
    state = held_state(optimizer, parameters)
    master = {name: f"{name}{_SUFFIX}" for name in weights.tensors if f"{name}{_SUFFIX}" in state.tensors}
    tensors = {
        name: state.tensors[master[name]] if name in master else weights.tensors[name] for name in weights.tensors
    }
    return Held(tensors, lambda name: state.read(master[name]) if name in master else weights.read(name))


def load_master_weights(
    state: TensorFiles,
    folder: Path,
    optimizer: Any,
    parameters: Mapping[str, Tensor],
    settings: MasterWeights,
    *,
    were_weights: bool,
    divided: bool = False,
    ranks: Ranks = SINGLE,
) -> str:
    """Set master weights from a checkpoint: from its optimizer state, or from its weights. Master weights of weights
    that are float32 here become these.

    Args:
        state: of the optimizer, as stored.
        were_weights: the checkpoint has them in the place of weights.
        divided: `state` is what this rank wrote of its own.

    Returns:
        What a user is to know of it; may be empty.

    Raises:
        CheckpointError: the checkpoint has none, or the run has no use for them, and the settings do not allow it.
    """
    whole = whole_state(optimizer, parameters)
    own = own_state(optimizer, parameters) if divided else whole
    here = [name.removesuffix(_SUFFIX) for name in own.held.tensors if is_master(name)]
    needed = set(here) if divided else {name for names in ranks.exchange(here) for name in names}
    stored = {name.removesuffix(_SUFFIX) for name in state.names if is_master(name)}
    missing, surplus = sorted(needed - stored), sorted(stored - needed)
    if missing and not (settings.compatible or were_weights or settings.stored == "nowhere"):
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
    if surplus and divided and "sharding" in ranks.layout:
        raise CheckpointError(
            f"{folder} holds master weights of which each rank wrote its share, for example of {surplus[0]}, and the "
            "weights of this run are float32.\n  Resume with the bf16, fp16 and fp16_opt_level that wrote it; with "
            "unified_checkpoint: true and no ignore_merge_optimizer its next checkpoint can be resumed from so."
        )
    weights = settings.weights_of(folder) if missing and settings.weights_of else None
    for name in here:
        key = f"{name}{_SUFFIX}"
        if name in stored:
            values = state.read(key)
            own.write(key, values if divided else ranks.own_part(name, values))
        elif weights is not None:
            whole.write(key, ranks.own_part(name, weights(name)))
        else:
            with ranks.present([parameters[name]]):
                values = values_of(parameters[name])
            whole.write(key, values)
    for name in surplus:
        if name in parameters:
            values = state.read(f"{name}{_SUFFIX}")
            with ranks.present([parameters[name]]):
                parameters[name].set_value(values if divided else ranks.own_part(name, values))
    if surplus:
        return "the float32 master weights of the checkpoint are the weights of this run"
    if missing and not were_weights:
        return "the checkpoint has no master weights: they are made from its weights, which is not bit-exact"
    return ""

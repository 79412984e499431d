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
from erniekit.model.whole import Held
from erniekit.training.optimizer import MASTER_WEIGHT, held_state, is_master, without_masters
from erniekit.training.ranks import SINGLE, Ranks
from erniekit.training.tensor_files import TensorFiles

_SUFFIX = f"/{MASTER_WEIGHT}"
ReadWeight = Callable[[str], np.ndarray]  # by Hugging Face name, in the decoder's layout, whole


@dataclass(frozen=True)
class MasterWeights:
    """How checkpoints have master weights.

    Attributes:
        stored: beside the weights, in their place, or not at all.
        compatible: a checkpoint may have none where the run needs them, or some that it does not need.
        weights_of: opens the weights of a checkpoint; None: they are only known as the run has them.
    """

    stored: Literal["beside", "as weights", "nowhere"] = "beside"
    compatible: bool = False
    weights_of: Callable[[Path], ReadWeight] | None = None

    def to_store(self, state: Held) -> Held:
        """What of an optimizer's state is stored with it."""
        return state if self.stored == "beside" else without_masters(state)


BESIDE = MasterWeights()


def master_weights(optimizer: Any, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those that an optimizer has, by the name of the weight; its own tensors, not copies."""
    state = held_state(optimizer, parameters)
    return {name.removesuffix(_SUFFIX): state.read(name) for name in state.tensors if is_master(name)}


def load_master_weights(
    state: TensorFiles,
    folder: Path,
    optimizer: Any,
    parameters: Mapping[str, Tensor],
    settings: MasterWeights,
    *,
    were_weights: bool,
    own_part: Callable[[str, np.ndarray], np.ndarray],
    ranks: Ranks = SINGLE,
) -> str:
    """Set master weights from a checkpoint: from its optimizer state, or from its weights. Master weights of weights
    that are float32 here become these.

    Args:
        state: of the optimizer, as stored.
        were_weights: the checkpoint has them in the place of weights.
        own_part: what this rank has of a stored tensor.

    Returns:
        What a user is to know of it; may be empty.

    Raises:
        CheckpointError: the checkpoint has none, or the run has no use for them, and the settings do not allow it.
    """
    own = master_weights(optimizer, parameters)
    needed = {name for names in ranks.exchange(sorted(own)) for name in names}
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
    weights = settings.weights_of(folder) if missing and settings.weights_of else None
    for name, master in own.items():
        if name in stored:
            master.set_value(own_part(name, state.read(f"{name}{_SUFFIX}")))
        elif weights is not None:
            master.set_value(own_part(name, weights(name)))
        else:
            master.set_value(parameters[name].astype("float32"))
    for name in surplus:
        if name in parameters:
            with ranks.present([parameters[name]]):
                parameters[name].set_value(own_part(name, state.read(f"{name}{_SUFFIX}")))
    if surplus:
        return "the float32 master weights of the checkpoint are the weights of this run"
    if missing and not were_weights:
        return "the checkpoint has no master weights: they are made from its weights, which is not bit-exact"
    return ""

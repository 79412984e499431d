"""The optimizer of a run, from sections 1.3, 1.5 and 2.4."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paddle import Tensor

from erniekit.parameters import Config
from erniekit.training.moments import MomentStorage, StoredMomentsAdamW
from erniekit.training.optimizer import OptimizerSettings, build_optimizer, stateless_optimizer


def moment_storage(config: Config) -> MomentStorage | None:
    """How AdamW's moments are kept; None: as Paddle's AdamW keeps them.

    Where sharding divides the optimizer, fleet keeps them: then these parameters are reported as without effect.
    """
    narrow, one_at_a_time = config.fp8.use_lowprecision_moment, config.fp8.tensorwise_offload_optimizer
    away = config.memory.offload_optim or one_at_a_time
    if config.distributed.sharding != "none" or not (config.training.optim == "adamw_custom" or narrow or away):
        return None
    return MomentStorage(narrow, Path(config.basic.output_dir).expanduser() if away else None, one_at_a_time)


def make_optimizer(config: Config, parameters: Mapping[str, Tensor], settings: OptimizerSettings) -> Any:
    """AdamW over the trainable ones of `parameters`, with its state, where one rank updates all that it has."""
    storage = moment_storage(config)
    if storage is None:
        return build_optimizer(parameters, settings)
    return StoredMomentsAdamW(stateless_optimizer(parameters, settings), parameters, storage)

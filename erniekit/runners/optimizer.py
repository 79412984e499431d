"""The optimizer of a run, from sections 1.3, 1.5 and 2.4."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from paddle import Tensor

from erniekit.parameters import Config
from erniekit.training.moments import MomentStorage, StoredMomentsAdamW
from erniekit.training.optimizer import OptimizerSettings, StatefulAdamW, stateless_optimizer


def moment_storage(config: Config) -> MomentStorage | None:
    """How AdamW's moments are kept; None: as Paddle's AdamW keeps them."""
    narrow, one_at_a_time = config.fp8.use_lowprecision_moment, config.fp8.tensorwise_offload_optimizer
    away = config.memory.offload_optim or one_at_a_time
    if not (config.training.optim == "adamw_custom" or narrow or away):
        return None
    return MomentStorage(narrow, Path(config.basic.output_dir).expanduser() if away else None, one_at_a_time)


def adamw_of(config: Config, parameters: Mapping[str, Tensor], settings: OptimizerSettings) -> StatefulAdamW:
    """AdamW over the trainable ones of `parameters`, which has no state yet."""
    storage = moment_storage(config)
    make = StatefulAdamW if storage is None else partial(StoredMomentsAdamW, storage)
    return stateless_optimizer(parameters, settings, make)

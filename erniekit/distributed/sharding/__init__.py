"""ZeRO sharding: data-parallel ranks of a group shard optimizer states, gradients and parameters, through fleet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddle import Tensor, nn
from paddle.optimizer import AdamW

from erniekit.distributed.sharding.optimizer import ShardedOptimizer
from erniekit.distributed.sharding.stage import ShardingStrategy
from erniekit.distributed.sharding.stage1 import OwnerShardedStates, SplitShardedStates
from erniekit.distributed.sharding.stage2 import ShardedGradients
from erniekit.distributed.sharding.stage3 import ShardedParameters
from erniekit.training.optim.adamw import trainable_parameters

__all__ = ["ShardedOptimizer", "ShardingStrategy", "shard_model"]


def shard_model(
    sharding_level: str,
    adamw: AdamW,
    model: nn.Layer,
    parameters: Mapping[str, Tensor],
    group: Any,
    *,
    split: bool = False,
    fused: bool = False,
    release: bool = False,
) -> ShardingStrategy:
    """Shard a run's memory over the ranks of a group; call it after loading weights and before AdamW has state.

    Args:
        sharding_level: `sharding`: "stage1" (optimizer states), "stage2" (also gradients) or "stage3" (also
            parameters).
        parameters: by name; the trainable ones are those of `adamw`.
        group: the sharding group.
        split: shard every parameter instead of assigning full parameters to ranks, in stage 1 (`split_param`);
            stage 3 always does.
        fused: exchange parameters in large buffers, in stage 1 (`enable_stage1_tensor_fusion`); `split` always does.
        release: free the memory of gradients after every step (`release_grads`).
    """
    trained = trainable_parameters(parameters)
    if sharding_level == "stage1":
        if split:
            return SplitShardedStates(adamw, trained, group, release=release)
        return OwnerShardedStates(adamw, trained, group, fused=fused and not release)
    if sharding_level == "stage2":
        return ShardedGradients(adamw, trained, group, model)
    assert sharding_level == "stage3", sharding_level
    return ShardedParameters(adamw, group, model)

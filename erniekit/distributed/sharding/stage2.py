"""ZeRO stage 2: the ranks of a sharding group also shard gradients (Rajbhandari et al., 2019, arXiv:1910.02054).

As soon as backward has computed a gradient, it is sent to the rank that updates its parameter and freed on the others.
Ranks send in the order in which their backward passes reach the parameters, so all ranks must reach each parameter in
every micro-batch, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import paddle
from paddle import Tensor, nn
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2 import GroupShardedOptimizerStage2
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage2 import GroupShardedStage2
from paddle.optimizer import AdamW

from erniekit.distributed.sharding.shards import ParamShard, owner_shard
from erniekit.distributed.sharding.stage import LossLayer, identity, local_gradients, no_gather
from erniekit.training.objectives.forward import LossFunction, MicroBatchLoss


class ShardedGradients:
    """Each parameter is updated by one rank, in order, by the rank with the fewest values so far."""

    reduces_in_backward = True
    full_param = local_param = staticmethod(identity)
    gather_params, gradients = staticmethod(no_gather), staticmethod(local_gradients)

    def __init__(self, optimizer: AdamW, parameters: Mapping[str, Tensor], group: Group, model: nn.Layer) -> None:
        device = paddle.get_device().partition(":")[0]
        common = {"group": group, "device": device}
        self._fleet = GroupShardedOptimizerStage2(
            list(parameters.values()), optimizer, pretrain_sync_models=False, **common
        )
        # buffer_max_size 0: small gradients do not wait for each other in a buffer that stays allocated
        self._layer = GroupShardedStage2(LossLayer(model), self._fleet, buffer_max_size=0, **common)
        self._group, owners = group, self._fleet.param2rank
        self._updated = [tensor for tensor in parameters.values() if owners[tensor.name] == group.rank]

    def param_shard(self, parameter: Tensor) -> ParamShard:
        return owner_shard(parameter, self._fleet.param2rank[parameter.name], self._group)

    def wrap(self, loss: LossFunction) -> LossFunction:
        def wrapped(model: Any, batch: Any) -> MicroBatchLoss:
            return self._layer(loss, batch)

        return wrapped

    def reduce_gradients(self) -> list[Tensor]:
        assert not any(self._layer._grad_reduced), "a parameter got no gradient from the last micro-batch"
        return self._updated  # these are sums; only fleet's own step would compute means

    def step(self) -> None:
        self._fleet._step()

    def clear_grad(self, set_to_zero: bool) -> None:
        for tensor in self._updated:
            tensor.clear_gradient(set_to_zero)

"""AdamW over this rank's shard of the parameters, with the interface of AdamW over all of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from paddle import Tensor
from paddle.distributed.communication.group import Group

from erniekit.distributed.sharding.shards import ParamShard, all_gather_param, broadcast_scalar, local_shard
from erniekit.distributed.sharding.stage import ShardingStrategy
from erniekit.model.local_tensors import LocalTensors, paddle_dtype, tensor_spec
from erniekit.model.storage.safetensors import StoredTensor
from erniekit.training.optim.adamw import OptimizerState, StatefulAdamW, create_state, trainable_parameters


class ShardedOptimizer:
    """The optimizer of a sharded run, and its full state for checkpoints.

    Args:
        adamw: the optimizer that the strategy was made with (`stateless_optimizer`).
        group: the sharding group.
    """

    def __init__(
        self, adamw: StatefulAdamW, sharding_strategy: ShardingStrategy, parameters: Mapping[str, Tensor], group: Group
    ) -> None:
        self._adamw, self._sharding_strategy, self._group = adamw, sharding_strategy, group
        self._parameters = trainable_parameters(parameters)
        updated = [sharding_strategy.param_shard(parameter).tensor for parameter in self._parameters.values()]
        create_state(adamw, [tensor for tensor in updated if tensor is not None])

    def set_lr(self, value: float) -> None:
        self._adamw.set_lr(value)

    def step(self) -> None:
        self._sharding_strategy.step()

    def clear_grad(self, set_to_zero: bool = True) -> None:
        self._sharding_strategy.clear_grad(set_to_zero)

    def state_tensors(self) -> dict[str, StoredTensor]:
        """Return dtype and shape of every full optimizer state, by `<parameter>/<kind>`."""
        return {
            f"{name}/{kind}": self._adamw.state_spec(kind, tensor_spec(parameter))
            for name, parameter in self._parameters.items()
            for kind in self._adamw.kinds(parameter)
        }

    def read_state(self, name: str) -> Tensor:
        """Return one of `state_tensors` on every rank of the group; all of them call this, in the same order."""
        shard, kind = self._param_shard(name)
        local_state = None if shard.tensor is None else self._adamw.read(shard.name, kind)
        full = self._adamw.state_spec(kind, tensor_spec(self._parameters[name.rpartition("/")[0]]))
        gather = broadcast_scalar if kind.endswith("pow_acc") else all_gather_param
        return gather(shard, local_state, self._group, paddle_dtype(full.dtype))

    def write_state(self, name: str, value: np.ndarray) -> None:
        """Set one of `state_tensors`; each rank takes its shard of the value."""
        shard, kind = self._param_shard(name)
        if shard.tensor is not None:
            local_value = value if kind.endswith("pow_acc") else local_shard(shard, value, self._group.rank)
            self._adamw.write(shard.name, kind, local_value)

    def local_optimizer_state(self) -> OptimizerState:
        """Return this rank's shard of the state, by the same names, as fleet shards it."""
        own = {name: self._param_shard(name) for name in self.state_tensors()}
        tensors = {
            name: self._adamw.state_spec(kind, tensor_spec(shard.tensor))
            for name, (shard, kind) in own.items()
            if shard.tensor is not None
        }

        def read(name: str) -> Tensor:
            shard, kind = own[name]
            return self._adamw.read(shard.name, kind)

        def write(name: str, values: np.ndarray) -> None:
            shard, kind = own[name]
            self._adamw.write(shard.name, kind, values)

        return OptimizerState(LocalTensors(tensors, read), write)

    def _param_shard(self, name: str) -> tuple[ParamShard, str]:
        parameter, _, kind = name.rpartition("/")
        return self._sharding_strategy.param_shard(self._parameters[parameter]), kind

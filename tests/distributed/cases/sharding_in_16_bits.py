"""Sharding of weights in bfloat16, whose float32 copies the ranks divide."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

from erniekit.config.sections.training import TrainingParameters
from erniekit.distributed.init import init_mesh
from erniekit.distributed.sharding import ShardedOptimizer, shard_model
from erniekit.distributed.topology import Topology
from erniekit.model.local_tensors import to_numpy
from erniekit.training.optim.adamw import (
    StatefulAdamW,
    create_state,
    optimizer_state,
    stateless_optimizer,
)
from erniekit.training.optim.offload import MomentStorage, StoredMomentsAdamW
from tests.adamw_kernel import update_16_bit_weights

SETTINGS = TrainingParameters(weight_decay=0.1, adam_epsilon=1e-3)
STEPS = 3


class Product(nn.Layer):
    """x times a matrix in bfloat16, computed in float32."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = self.create_parameter([6, 8], dtype="bfloat16")
        values = np.random.default_rng(seed).standard_normal([6, 8]).astype(np.float32)
        self.weight.set_value(paddle.to_tensor(values).astype("bfloat16"))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.matmul(x, self.weight.astype("float32"))


class Scale(nn.Layer):
    """x times a vector in float32, as norms are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([6], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x * self.weight


class Model(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Product(1), Product(2), Scale()

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.first(x).sum() + self.second(2 * x).sum() + self.head(x).sum()


def batch(step: int, number: int, rank: int) -> paddle.Tensor:
    """Small whole numbers, so that gradients and their sums are exact in bfloat16."""
    return paddle.to_tensor(np.random.default_rng((step, number, rank)).integers(-3, 4, [3, 6]).astype(np.float32))


def compare(
    sharding: str, options: Mapping[str, bool], away: str = "", wide_gradients: bool = False, micro_batches: int = 1
) -> list[str]:
    """What of the state and of the weights after some steps is not that of one process, to the bit.

    Args:
        away: where what AdamW remembers lies between steps; "": in memory.
        wide_gradients: make them float32 at the end of a backward pass, as AMP does with `amp_master_grad`.
        micro_batches: of a step; a CPU cannot add all kinds of gradients up.
    """
    update_16_bit_weights()
    mesh = init_mesh(Topology.from_degrees(2, sharding=2), timeout=60)
    alone, model = Model(), Model()
    named, own = dict(alone.named_parameters()), dict(model.named_parameters())
    single = stateless_optimizer(named, SETTINGS)
    create_state(single, named.values())
    make: Any = partial(StoredMomentsAdamW, MomentStorage(folder=Path(away))) if away else StatefulAdamW
    adamw = stateless_optimizer(own, SETTINGS, make)
    sharding_strategy = shard_model(sharding, adamw, model, own, mesh.group("sharding"), **options)
    divided = ShardedOptimizer(adamw, sharding_strategy, own, mesh.group("sharding"))
    loss = sharding_strategy.wrap(lambda model, x: model(x))
    for step in range(STEPS):
        for optimizer in (single, divided):
            optimizer.set_lr(0.1)
        for number in range(micro_batches):
            alone(paddle.concat([batch(step, number, rank) for rank in range(2)])).backward()
            loss(model, batch(step, number, mesh.dp_rank)).backward()
            if wide_gradients:
                paddle.base.core.eager.set_master_grads([*named.values(), *own.values()])
        sharding_strategy.reduce_gradients()
        single.step()
        divided.step()
        single.clear_grad()
        divided.clear_grad()
    state = optimizer_state(single, named)
    assert any(name.endswith("/master_weight") for name in state)
    wrong = [name for name in state if not np.array_equal(to_numpy(divided.read_state(name)), state[name].numpy())]
    weights = {name: to_numpy(sharding_strategy.full_param(parameter)) for name, parameter in own.items()}
    return wrong + [name for name in named if not np.array_equal(weights[name], to_numpy(named[name]))]

"""Sharding against one process: the same batches, divided between ranks, give the same steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from erniekit.data.batches import Batch, collate
from erniekit.data.template import Sample
from erniekit.model.adapters.lora import add_adapters, trained_weights
from erniekit.model.adapters.settings import LoraSettings
from erniekit.model.decoder import Decoder
from erniekit.model.recompute import Recompute
from erniekit.model.weights import named_weights
from erniekit.parallel.mesh import Mesh
from erniekit.parallel.ranks import LayoutRanks
from erniekit.parallel.sharding import DividedOptimizer, Stage, divide
from erniekit.parallel.start import start_ranks
from erniekit.parallel.topology import Topology
from erniekit.training.objectives import supervised
from erniekit.training.optimizer import OptimizerSettings, build_optimizer, optimizer_state, stateless_optimizer
from erniekit.training.ranks import SINGLE, Ranks
from erniekit.training.step import train_step
from tests.model.tiny import tiny_model

STEPS = 5
LEARNING_RATE, MAX_NORM = 1e-2, 0.05  # the norms are larger, so every step is clipped
SETTINGS = OptimizerSettings(
    weight_decay=0.1, epsilon=1e-3, layerwise_lr_decay_bound=0.5, num_layers=2, lora_plus_scale=4.0
)
MICRO_BATCHES = 8  # of a step, on all ranks together


def batch(step: int, number: int) -> Batch:
    """Two rows of two documents of different lengths. The last of each third step is one of padding, as a plan gives it
    to a rank for which nothing is left."""
    if step % 3 == 2 and number == MICRO_BATCHES - 1:
        return collate([[]], [[]], 0)
    random = np.random.default_rng((step, number))

    def sample() -> Sample:
        ids = random.integers(0, 53, random.integers(5, 10))
        return Sample(ids[:-1].astype(np.int32), np.where(np.arange(len(ids) - 1) < 2, -100, ids[1:]).astype(np.int32))

    return collate([[sample(), sample()] for _ in range(2)], [[0, 1], [2, 3]], 0)


@dataclass
class Run:
    """A model in training, on one process or as one of several ranks."""

    model: Decoder
    parameters: Mapping[str, paddle.Tensor]
    optimizer: Any
    ranks: Ranks
    mesh: Mesh
    stage: Stage | None = None

    def steps(self, first: int, stop: int) -> list[tuple[float, float]]:
        """Loss and gradient norm of each."""
        readers, reader = self.mesh.topology.readers, self.mesh.reader
        figures = []
        for step in range(first, stop):
            result = train_step(
                self.model,
                list(self.parameters.values()),
                self.optimizer,
                supervised(fused_head=True),
                [batch(step, number) for number in range(MICRO_BATCHES)][reader::readers],
                step=step,
                learning_rate=LEARNING_RATE * (step + 1),
                max_grad_norm=MAX_NORM,
                ranks=self.ranks,
            )
            figures.append((result.totals.loss, result.grad_norm))
        return figures

    def weights(self) -> dict[str, np.ndarray]:
        """All of them, frozen ones too, whole on every rank."""
        everything = {**named_weights(self.model), **self.parameters}
        return {name: (self.stage.weight(p) if self.stage else p).numpy() for name, p in everything.items()}

    def state(self) -> dict[str, np.ndarray]:
        """What AdamW remembers, whole on every rank."""
        if self.stage is None:
            return {name: value.numpy() for name, value in optimizer_state(self.optimizer, self.parameters).items()}
        return {name: self.optimizer.read_state(name).numpy() for name in self.optimizer.state_shapes()}


def model(lora: str = "", recompute: str = "", **changes: Any) -> Decoder:
    """lora: "lora", "dora" or "" for full training; recompute: "reentrant", "hooks" or ""; changes of the model."""
    decoder = tiny_model(**changes)
    if lora:
        add_adapters(decoder, LoraSettings(rank=4, alpha=8.0, dora=lora == "dora"), seed=1)
        for parameter in trained_weights(decoder).values():  # B is zero, and then A has no gradient
            values = 0.1 * np.random.default_rng(parameter.size).standard_normal(parameter.shape)
            parameter.set_value(values.astype(np.float32))
    decoder.recompute = Recompute(recompute == "reentrant") if recompute else None
    return decoder


def alone(**kind: Any) -> Run:
    decoder = model(**kind)
    parameters = trained_weights(decoder)
    return Run(decoder, parameters, build_optimizer(parameters, SETTINGS), SINGLE, Mesh())


def sharded(mesh: Mesh, sharding: str, split: bool, **kind: Any) -> Run:
    decoder = model(**kind)
    parameters = trained_weights(decoder)
    adamw, group = stateless_optimizer(parameters, SETTINGS), mesh.group("sharding")
    stage = divide(sharding, adamw, decoder, parameters, group, split=split)
    optimizer = DividedOptimizer(adamw, stage, parameters, group)
    return Run(decoder, parameters, optimizer, LayoutRanks(mesh, parameters, stage=stage), mesh, stage)


def compare(degree: int, sharding: str, split: bool = False, **kind: Any) -> dict[str, float]:
    """The largest differences from one process after five steps, those of state and weights relative to the tensor."""
    mesh = start_ranks(Topology.from_degrees(paddle.distributed.ParallelEnv().world_size, sharding=degree), timeout=60)
    single, run = alone(**kind), sharded(mesh, sharding, split, **kind)
    expected, figures = np.array(single.steps(0, STEPS)), np.array(run.steps(0, STEPS))
    return {
        "loss": float(np.abs(figures - expected)[:, 0].max()),
        "norm": float(np.abs(figures / expected - 1)[:, 1].max()),
        "state": _largest(run.state(), single.state()),
        "weight": _largest(run.weights(), single.weights()),
        "change": _largest(alone(**kind).weights(), single.weights()),
        "clipped": float(expected[:, 1].min() > MAX_NORM),
    }


def _largest(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    assert found.keys() == expected.keys()
    return max(float(np.abs(found[name] - value).max() / np.abs(value).max()) for name, value in expected.items())

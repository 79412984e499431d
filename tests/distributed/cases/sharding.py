"""Sharding against one process: the same batches, divided between ranks, give the same steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from erniekit.config.sections.moe import MoeParameters
from erniekit.config.sections.training import TrainingParameters
from erniekit.data.batch import Batch
from erniekit.data.collate import collate
from erniekit.data.templates.ernie import Sample
from erniekit.distributed.collectives import LayoutRanks
from erniekit.distributed.init import init_mesh
from erniekit.distributed.mesh import SINGLE_PROCESS_MESH, Mesh
from erniekit.distributed.sharding import ShardedOptimizer, ShardingStrategy, shard_model
from erniekit.distributed.topology import BATCH_AXES, Topology
from erniekit.model.builder import build_model
from erniekit.model.decoder import Decoder
from erniekit.model.local_tensors import to_numpy
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.lora import add_adapters, named_trainable_parameters
from erniekit.model.moe.dispatch import ExpertParallel, LocalDispatcher
from erniekit.model.recompute import Recompute
from erniekit.model.weights import named_weights
from erniekit.training.collectives import SINGLE_PROCESS, Ranks
from erniekit.training.objectives.forward import MicroBatchLoss
from erniekit.training.objectives.objective import supervised
from erniekit.training.objectives.reference import eval_mode
from erniekit.training.optim.adamw import (
    StatefulAdamW,
    build_optimizer,
    optimizer_state,
    stateless_optimizer,
)
from erniekit.training.optim.offload import MomentStorage, StoredMomentsAdamW
from erniekit.training.step import NotFiniteError, train_step
from tests.model.tiny import tiny_config, tiny_model

STEPS = 5
LEARNING_RATE, MAX_NORM = 1e-2, 0.005  # the norms are larger, so every step is clipped
SETTINGS = TrainingParameters(weight_decay=0.1, adam_epsilon=1e-3, layerwise_lr_decay_bound=0.5)
SCALES: Any = {"num_layers": 2, "lora_plus_scale": 4.0}
BALANCE = MoeParameters(0.3, 0.2, 0.1, moe_router_bias_update_rate=0.01)
MICRO_BATCHES = 7  # of a step, on all ranks together


def batch(step: int, number: int) -> Batch:
    """Two rows of two documents of different lengths."""
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
    sharding_strategy: ShardingStrategy | None = None
    release: bool = False

    def steps(self, first: int, stop: int) -> list[tuple[float, float]]:
        """Loss and gradient norm of each."""
        dp_world_size, dp_rank = self.mesh.topology.dp_world_size, self.mesh.dp_rank
        figures = []
        for step in range(first, stop):
            result = train_step(
                self.model,
                list(self.parameters.values()),
                self.optimizer,
                supervised(fused_head=True, multi_token_pred_lambda=0.3),
                _part([batch(step, number) for number in range(MICRO_BATCHES)], dp_rank, dp_world_size),
                step=step,
                learning_rate=LEARNING_RATE * (step + 1),
                max_grad_norm=MAX_NORM,
                release_grads=self.release,
                ranks=self.ranks,
            )
            figures.append((result.totals.loss, result.grad_norm))
        return figures

    def weights(self) -> dict[str, np.ndarray]:
        """All of them, frozen ones too, whole on every rank."""
        everything = {**named_weights(self.model), **self.parameters}
        return {
            name: (self.sharding_strategy.full_param(p) if self.sharding_strategy else p).numpy()
            for name, p in everything.items()
        }

    def state(self) -> dict[str, np.ndarray]:
        """What AdamW remembers, whole on every rank."""
        if self.sharding_strategy is None:
            return {name: value.numpy() for name, value in optimizer_state(self.optimizer, self.parameters).items()}
        return {name: to_numpy(self.optimizer.read_state(name)) for name in self.optimizer.state_tensors()}


def model(mesh: Mesh, lora: str = "", recompute: str = "", **changes: Any) -> Decoder:
    """lora: "lora", "one" (a single linear), "dora" or "" (full training); recompute: "reentrant", "hooks" or ""."""
    expert_parallel = ExpertParallel(LocalDispatcher(run_all_experts=True), lambda loads: mesh.sum(loads, *BATCH_AXES))
    decoder = build_model(tiny_config(**changes), None, balance=BALANCE, expert_parallel=expert_parallel)
    values = named_weights(tiny_model(**changes))
    for name, parameter in named_weights(decoder).items():
        parameter.set_value(values[name])
    if lora:
        targets = ("model.layers.0.self_attn.q_proj",) if lora == "one" else ()
        settings = LoraSettings(rank=4, alpha=8.0, dora=lora == "dora", target_modules=targets)
        add_adapters(decoder, settings, seed=1)
        for parameter in named_trainable_parameters(decoder).values():  # B is zero, and then A has no gradient
            values = 0.1 * np.random.default_rng(parameter.size).standard_normal(parameter.shape)
            parameter.set_value(values.astype(np.float32))
    decoder.recompute = Recompute(recompute == "reentrant") if recompute else None
    return decoder


def single_process_run(**kind: Any) -> Run:
    decoder = model(SINGLE_PROCESS_MESH, **kind)
    parameters = named_trainable_parameters(decoder)
    optimizer = build_optimizer(parameters, SETTINGS, **SCALES)
    return Run(decoder, parameters, optimizer, SINGLE_PROCESS, SINGLE_PROCESS_MESH)


def sharded(
    mesh: Mesh,
    sharding: str,
    options: Mapping[str, bool],
    decoder: Decoder | None = None,
    moments: Mapping[str, Any] | None = None,
    **kind: Any,
) -> Run:
    decoder = decoder or model(mesh, **kind)
    parameters = named_trainable_parameters(decoder)
    make: Any = StatefulAdamW
    if moments is not None:
        folder = Path(moments["folder"]) if "folder" in moments else None
        make = partial(StoredMomentsAdamW, MomentStorage(moments.get("bfloat16", False), folder, release=True))
    adamw, group = stateless_optimizer(parameters, SETTINGS, make, **SCALES), mesh.group("sharding")
    sharding_strategy = shard_model(sharding, adamw, decoder, parameters, group, **options)
    optimizer = ShardedOptimizer(adamw, sharding_strategy, parameters, group)
    return Run(
        decoder,
        parameters,
        optimizer,
        LayoutRanks(mesh, parameters, decoder.config.architecture, sharding_strategy=sharding_strategy),
        mesh,
        sharding_strategy,
        options.get("release", False),
    )


def compare(
    degree: int, sharding: str, options: Mapping[str, bool], moments: Mapping[str, Any] | None = None, **kind: Any
) -> dict[str, float]:
    """The largest differences from one process: of losses and norms over five steps, of the gradients of the first step
    (clipped, from the first moments), of state and weights after the last, each relative to the tensor's largest."""
    mesh = _start(degree)
    single, run = single_process_run(**kind), sharded(mesh, sharding, options, moments=moments, **kind)
    expected, figures = single.steps(0, 1), run.steps(0, 1)
    gradient = _largest(_first_moments(run), _first_moments(single))
    expected += single.steps(1, STEPS)
    figures += run.steps(1, STEPS)
    (losses, norms), (found_losses, found_norms) = np.transpose(expected), np.transpose(figures)
    assert norms.min() > MAX_NORM  # every step is clipped
    return {
        "loss": float(np.abs(found_losses - losses).max()),
        "norm": float(np.abs(found_norms / norms - 1).max()),
        "gradient": gradient,
        "state": _largest(run.state(), single.state()),
        "weight": _largest(run.weights(), single.weights()),
    }


def resume(
    degree: int, sharding: str, options: Mapping[str, bool], moments: Mapping[str, Any] | None = None, **kind: Any
) -> bool:
    """Whether a run that goes on from what another one has saved, whole, ends with the same bits."""
    mesh = _start(degree)
    run = sharded(mesh, sharding, options, moments=moments, **kind)
    run.steps(0, 3)
    with eval_mode(run.model):
        run.ranks.forward_only(run.model, supervised().loss, [batch(9, mesh.dp_rank)])  # an evaluation in between
    weights, state = run.weights(), run.state()
    figures = run.steps(3, STEPS)
    decoder = model(mesh, **kind)
    for name, parameter in {**named_weights(decoder), **named_trainable_parameters(decoder)}.items():
        parameter.set_value(weights[name])
    later = sharded(mesh, sharding, options, decoder, moments)
    for name, values in state.items():
        later.optimizer.write_state(name, values)
    assert all(np.array_equal(values, state[name]) for name, values in later.state().items())
    same = later.steps(3, STEPS) == figures
    ends = run.weights(), later.weights()
    return same and all(np.array_equal(values, ends[1][name]) for name, values in ends[0].items())


def not_finite(degree: int, sharding: str, options: Mapping[str, bool], **kind: Any) -> list[int]:
    """The micro-batches that this rank names where the gradient of the last one of rank 1 is not finite."""
    mesh = _start(degree)
    run, objective = sharded(mesh, sharding, options, **kind), supervised()
    batches = [batch(0, number) for number in range(3 * mesh.dp_rank, 3 * mesh.dp_rank + 3)]

    def loss_head(decoder: Decoder, hidden: Any, context: Any, batch: Batch, reference_input: Any) -> MicroBatchLoss:
        result = objective.loss.loss_head(decoder, hidden, context, batch, reference_input)
        if batch is batches[2] and mesh.dp_rank == 1:
            nothing = (0.0 * result.loss_sum).sqrt()  # its derivative is 0 / 0
            return result._replace(loss_sum=result.loss_sum + nothing)
        return result

    try:
        parameters = list(run.parameters.values())
        poisoned = replace(objective, loss=replace(objective.loss, loss_head=loss_head))
        train_step(run.model, parameters, run.optimizer, poisoned, batches, step=0, learning_rate=0.1, ranks=run.ranks)
    except NotFiniteError as error:
        return list(error.micro_batches)
    raise AssertionError("the step has gone well")


def held_bytes(degree: int, sharding: str, options: Mapping[str, bool], **kind: Any) -> dict[str, int]:
    """What this rank holds between a backward pass and the update that follows, beside activations; and the most in
    gradients during the passes."""
    mesh = _start(degree)
    run = single_process_run(**kind) if sharding == "none" else sharded(mesh, sharding, options, **kind)
    run.steps(0, 1)
    loss = run.sharding_strategy.wrap(supervised().loss) if run.sharding_strategy else supervised().loss
    parameters = run.model.parameters()

    def gradients() -> int:
        return _bytes(part for p in parameters for part in (p.grad, getattr(p, "bw_storage", None)))

    during: list[int] = []
    for parameter in run.parameters.values():
        parameter._register_backward_hook(lambda: during.append(gradients()))
    for number in range(2):
        run.model.begin_micro_batch(step=1, micro_batch=number)
        loss(run.model, batch(1, number)).loss_sum.backward()
    adamw = getattr(run.optimizer, "_adamw", run.optimizer)
    return {
        "state": _bytes(tensor for kind in adamw._accumulators.values() for tensor in kind.values()),
        "gradients": gradients(),
        "gradients in passes": max(during),
        "parameters": _bytes(part for p in parameters for part in (p, getattr(p, "fw_storage", None))),
    }


def _part(batches: list[Batch], dp_rank: int, dp_world_size: int) -> list[Batch]:
    """A rank's micro-batches, as many as the others', as a plan gives them: one of padding where nothing is left."""
    own = batches[dp_rank::dp_world_size]
    return own + [collate([[]], [[]], 0)] * (-(-len(batches) // dp_world_size) - len(own))


def _start(degree: int) -> Mesh:
    ranks = paddle.distributed.ParallelEnv().world_size
    return init_mesh(Topology.from_degrees(ranks, sharding=degree), timeout=60)


def _bytes(tensors: Iterable[paddle.Tensor | None]) -> int:
    return sum(t.size * t.element_size() for t in tensors if t is not None and t._is_initialized())


def _first_moments(run: Run) -> dict[str, np.ndarray]:
    return {name: values for name, values in run.state().items() if name.endswith("/moment1")}


def _largest(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    assert found.keys() == expected.keys()
    return max(float(np.abs(found[name] - value).max() / np.abs(value).max()) for name, value in expected.items())

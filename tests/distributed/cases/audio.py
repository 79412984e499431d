"""Models that listen on a layout against one process: the same batches, some of them without a recording."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle.base import core

from erniekit.build.adapters import adapter_plan
from erniekit.build.distributed import join_ranks, model_shard_arguments, optimizer_and_ranks
from erniekit.build.model import _recompute
from erniekit.build.parts import frozen_parts
from erniekit.config import Config
from erniekit.distributed.mesh import SINGLE_PROCESS_MESH, Mesh
from erniekit.distributed.topology import topology_from
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.lora.lora import named_trainable_parameters
from erniekit.model.weights import named_weights
from erniekit.training.objectives.objective import supervised
from erniekit.training.objectives.reference import eval_mode
from erniekit.training.optim.adamw import build_optimizer, trainable_parameters
from erniekit.training.step import train_step
from tests.config.samples import load
from tests.distributed.cases.single_process import shared_results
from tests.model.tiny_audio import audio_batch, audio_config

# The windows in each micro-batch of a step. Of two ranks with different data the second has none in the first step, and
# nobody has one in the second.
WINDOWS = ((2, 0, 1, 0), (0, 0, 0, 0), (1, 2, 0, 1))


def compare_all(
    world: int, degrees: dict[str, Any], cases: dict[str, dict[str, Any]], results: str
) -> dict[str, dict[str, float]]:
    """`compare` for several cases, by name; what one process computes is in the folder `results`, for all layouts."""
    paddle.set_default_dtype("float64")
    mesh = join_ranks(load(), topology_from(load(**degrees), world))
    alone = shared_results(mesh, results, list(cases.values()), _train_alone)
    return {
        name: compare(mesh, degrees, expected, **case)
        for (name, case), expected in zip(cases.items(), alone, strict=True)
    }


def compare(mesh: Mesh, degrees: dict[str, Any], alone: dict[str, Any], family: str, **values: Any) -> dict[str, float]:
    """Train on the layout; the largest relative differences of losses, norms and weights at the end from `alone`."""
    own = _train(mesh, load(**degrees, **values), family)
    placement = audio_config(family).architecture.placement
    worst = {"loss": 0.0, "weight": 0.0}
    for figures, expected in zip(own["figures"], alone["figures"], strict=True):
        worst["loss"] = max(worst["loss"], float(np.abs(np.array(figures) / np.array(expected) - 1).max()))
    for name, weight in own["weights"].items():
        whole = alone["weights"][name]
        difference = np.abs(weight - mesh.tp.local_shard(whole, placement(name).axis)).max()
        worst["weight"] = max(worst["weight"], float(difference))
    moved = [name for name, weight in alone["weights"].items() if np.abs(weight - alone["start"][name]).max() > 1e-4]
    return {**worst, "moved": len(moved)}


def _train_alone(family: str, **values: Any) -> dict[str, Any]:
    return _train(SINGLE_PROCESS_MESH, load(**values), family)


def row_length(windows: int) -> int:
    """Return the length of rows that hold so many windows of 50 placeholders."""
    return windows * 50 + 20


def peak_of_training(shape: dict[str, Any], windows: int, **values: Any) -> int:
    """Return the peak in bytes of all tensors in two steps, as Paddle counts it; a process has one peak."""
    config, model_config = load(**values), ModelConfig.from_json(shape)
    model = build_model(
        model_config, None, frozen=frozen_parts(config, model_config), recompute=_recompute(config)
    )  # fmt: skip
    trained = trainable_parameters(named_trainable_parameters(model))
    optimizer = build_optimizer(trained, config.training)
    for step in range(2):
        batch = audio_batch(model_config, windows, step, length=row_length(windows))
        parameters = list(trained.values())
        train_step(model, parameters, optimizer, supervised(), [batch], step=step, learning_rate=1e-4)
    return int(core.host_memory_stat_peak_value("Allocated", 0))


def _train(mesh: Mesh, config: Config, family: str) -> dict[str, Any]:
    model_config = audio_config(family)
    plan = adapter_plan(config, model_config)
    model = build_model(
        model_config,
        None,
        seed=5,
        lora=plan.settings if plan else None,
        frozen=() if plan else frozen_parts(config, model_config),
        recompute=_recompute(config),
        **model_shard_arguments(config, model_config, mesh),
    )
    parameters = named_trainable_parameters(model)
    for name, parameter in parameters.items():
        if name.endswith("lora_B"):  # it is zero, and then A has no gradient
            parameter.set_value(_some_values(mesh, model_config, name, parameter))
    everything = {**named_weights(model), **parameters}
    start = {name: weight.numpy().copy() for name, weight in everything.items()}
    optimizer, ranks = optimizer_and_ranks(config, mesh, model, parameters)
    trained = list(trainable_parameters(parameters).values())
    dp_rank, dp_world_size = mesh.dp_rank, mesh.topology.dp_world_size
    objective, figures = supervised(), []
    for step, windows in enumerate(WINDOWS):
        batches = [audio_batch(model_config, count, (step, number)) for number, count in enumerate(windows)]
        result = train_step(
            model, trained, optimizer, objective, batches[dp_rank::dp_world_size],
            step=step, learning_rate=1e-2, max_grad_norm=0.5, ranks=ranks,
        )  # fmt: skip
        figures.append((result.totals.loss, result.grad_norm, result.totals.audio_seconds + 1))
    with eval_mode(model):
        batches = [audio_batch(model_config, count, (9, count)) for count in (0, 1)]
        losses = ranks.forward_only(model, objective.loss, [batches[dp_rank % 2]])
        losses += ranks.forward_only(model, objective.loss, [batches[1 - dp_rank % 2]])
    total = float(sum(value["loss_sum"] for value in losses))
    figures.append((total, total, 1.0))
    weights = {
        name: (weight if mesh is SINGLE_PROCESS_MESH else ranks._full_param(weight)).numpy()
        for name, weight in everything.items()
    }
    return {"figures": figures, "weights": weights, "start": start}


def _some_values(mesh: Mesh, model_config: Any, name: str, parameter: paddle.Tensor) -> np.ndarray:
    axis = model_config.architecture.placement(name).axis
    shape = list(parameter.shape)
    if axis is not None:
        shape[axis] *= mesh.tp.size
    whole = 0.1 * np.random.default_rng(len(name)).standard_normal(shape)
    return mesh.tp.local_shard(whole, axis)

"""Models that speak on a layout against one process: the same batches, some of them without codes of some levels."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from erniekit.build.adapters import adapter_plan
from erniekit.build.distributed import join_ranks, model_shard_arguments, optimizer_and_ranks
from erniekit.build.model import _recompute
from erniekit.build.parts import frozen_parts
from erniekit.config import Config
from erniekit.data.batch import Batch
from erniekit.distributed.mesh import SINGLE_PROCESS_MESH, Mesh
from erniekit.distributed.topology import topology_from
from erniekit.model.builder import build_model
from erniekit.model.lora.lora import named_trainable_parameters
from erniekit.model.weights import named_weights
from erniekit.training.objectives.codes import ar_nar_codes, masked_codes
from erniekit.training.objectives.objective import Objective
from erniekit.training.objectives.reference import eval_mode
from erniekit.training.optim.adamw import trainable_parameters
from erniekit.training.step import train_step
from tests.config.samples import load
from tests.training.code_batches import batch_of, documents, speaking_config

# The documents in each micro-batch of a step, in its two rows. Of two ranks with different data the second has none in
# the first step, and nobody has one in the second. With AR and NAR one document has one level, so micro-batches of one
# lack most of them.
DOCUMENTS = ((5, 0, 1, 0), (0, 0, 0, 0), (1, 2, 6, 1))


def compare_all(world: int, degrees: dict[str, Any], cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """`compare` for several cases, by name."""
    paddle.set_default_dtype("float64")
    mesh = join_ranks(load(), topology_from(load(**degrees), world))
    return {name: compare(mesh, degrees, **case) for name, case in cases.items()}


def compare(
    mesh: Mesh, degrees: dict[str, Any], objective: str, fused: bool = False, **values: Any
) -> dict[str, float]:
    """Train on the layout and alone; the largest relative difference of losses, norms and metrics, and the largest of
    weights at the end."""
    alone = _train(SINGLE_PROCESS_MESH, load(**values), objective, fused)
    own = _train(mesh, load(**degrees, **values), objective, fused)
    placement = speaking_config(objective).architecture.placement
    worst = {"loss": 0.0, "weight": 0.0}
    for figures, expected in zip(own["figures"], alone["figures"], strict=True):
        assert figures.keys() == expected.keys(), (figures, expected)
        for name, value in figures.items():
            worst["loss"] = max(worst["loss"], abs(value - expected[name]) / max(1.0, abs(expected[name])))
    for name, weight in own["weights"].items():
        whole = alone["weights"][name]
        difference = np.abs(weight - mesh.tp.local_shard(whole, placement(name).axis)).max()
        worst["weight"] = max(worst["weight"], float(difference))
    moved = [name for name, weight in alone["weights"].items() if np.abs(weight - alone["start"][name]).max() > 1e-4]
    return {**worst, "moved": len(moved)}


def _train(mesh: Mesh, config: Config, name: str, fused: bool) -> dict[str, Any]:
    model_config, objective = speaking_config(name), _objective(name, fused)
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
    everything = {**named_weights(model), **parameters}
    start = {weight: values.numpy().copy() for weight, values in everything.items()}
    optimizer, ranks = optimizer_and_ranks(config, mesh, model, parameters)
    trained = list(trainable_parameters(parameters).values())
    dp_rank, dp_world_size = mesh.dp_rank, mesh.topology.dp_world_size
    figures = []
    for step, counts in enumerate(DOCUMENTS):
        batches = [_batch(name, count, (step, number)) for number, count in enumerate(counts)]
        result = train_step(
            model, trained, optimizer, objective, batches[dp_rank::dp_world_size],
            step=step, learning_rate=1e-2, max_grad_norm=0.5, ranks=ranks,
        )  # fmt: skip
        figures.append({"loss": result.totals.loss, "norm": result.grad_norm, **result.totals.metrics})
    with eval_mode(model):
        batches = [_batch(name, count, (9, count)) for count in (0, 5)]
        own = batches[dp_rank::dp_world_size] if dp_world_size > 1 else batches
        loss = objective.loss_for(model, own, ranks)
        losses = [ranks.forward_only(model, loss, [batch])[0] for batch in own]
    summed = ranks.sum(np.array([sum(float(of["loss_sum"]) for of in losses)]))
    figures.append({"evaluation": float(summed[0])})
    weights = {
        weight: (values if mesh is SINGLE_PROCESS_MESH else ranks._full_param(values)).numpy()
        for weight, values in everything.items()
    }
    return {"figures": figures, "weights": weights, "start": start}


def _objective(name: str, fused: bool) -> Objective:
    if name == "masked":
        return masked_codes((8.0, 4.0, 2.0, 1.0), fused_head=fused)
    return ar_nar_codes((8.0, 4.0, 2.0, 1.0), (0.3, 0.5, 2.0), fused_head=fused)


def _batch(name: str, count: int, seed: object) -> Batch:
    """Two rows padded to one length, which tensor-parallel ranks can divide."""
    found = documents(name, seed, count)
    batch = batch_of(name, [found[0::2], found[1::2]])
    return batch.padded(2, -(-batch.shape[1] // 8) * 8)

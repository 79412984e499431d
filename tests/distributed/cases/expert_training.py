"""A tiny decoder of experts, trained with its ranks and by one process; in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from erniekit.config.sections.moe import MoeParameters
from erniekit.config.sections.training import TrainingParameters
from erniekit.data.batch import Batch
from erniekit.data.collate import collate
from erniekit.data.templates.ernie import Sample
from erniekit.distributed.collectives import LayoutRanks
from erniekit.distributed.experts import expert_ranks
from erniekit.distributed.init import init_mesh
from erniekit.distributed.mesh import SINGLE_PROCESS_MESH, Mesh
from erniekit.distributed.topology import Topology
from erniekit.model.architectures.ernie4_5 import ERNIE4_5_MOE
from erniekit.model.builder import build_model
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.lora import named_trainable_parameters
from erniekit.model.recompute import Recompute
from erniekit.model.weights import named_weights
from erniekit.training.collectives import SINGLE_PROCESS, Ranks
from erniekit.training.objectives.objective import supervised
from erniekit.training.optim.adamw import build_optimizer
from erniekit.training.step import train_step
from tests.distributed.cases.single_process import shared_results
from tests.model.tiny import EXPERTS, tiny_config

STEPS, VOCABULARY = 3, 56
MOE = {
    **EXPERTS,
    "vocab_size": VOCABULARY,
    "moe_layer_start_index": 0,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "initializer_range": 0.2,
}
LOSSES = MoeParameters(0.3, 0.2, 0.1, 0.01)
LENGTHS = [  # of the documents in each row; a micro-batch has one row, and an empty one is padding
    [[9, 14], [20], [5, 5, 6], []],
    [[24], [3, 20], [], [11]],
]


def compare(degrees: dict[str, Any], runs: list[dict[str, Any]], results: str) -> list[dict[str, float]]:
    """The largest differences of each of several runs: losses, norms and figures of all steps, and weights in the end.

    Args:
        runs: `gather`, `padded`, `recompute` (None, "hooks", "PyLayer") and `lora` (settings) of each.
        results: a folder of what one process computes, for all layouts.
    """
    paddle.set_default_dtype("float64")
    world = int(np.prod([value for value in degrees.values() if type(value) is int]))
    data = degrees.pop("data", 1)
    topology = Topology.from_degrees(world, **degrees)
    assert topology.data == data
    mesh = init_mesh(topology, timeout=120)
    alone = shared_results(mesh, results, [{"lora": run.get("lora")} for run in runs], _train_alone)
    return [_compare(mesh, expected, **run) for expected, run in zip(alone, runs, strict=True)]


def _compare(
    mesh: Mesh,
    alone: dict[str, Any],
    gather: bool = False,
    padded: bool = False,
    recompute: str | None = None,
    lora: dict[str, Any] | None = None,
) -> dict[str, float]:
    own = _train(mesh, recompute=recompute, lora=lora, gather=gather, padded=padded)
    worst = {name: _largest(own[name], alone[name]) for name in ("losses", "norms", "figures")}
    weights = [
        abs(values - mesh.tp.local_shard(alone["weights"][name], ERNIE4_5_MOE.placement(name).axis))
        for name, values in own["weights"].items()
    ]
    return worst | {"weights": float(max(part.max() for part in weights))}


def _train_alone(lora: dict[str, Any] | None) -> dict[str, Any]:
    return _train(SINGLE_PROCESS_MESH, recompute=None, lora=lora)


def _largest(own: list, expected: list) -> float:
    return float(np.abs(np.array(own) - np.array(expected)).max())


def _train(
    mesh: Mesh, *, recompute: str | None, lora: dict[str, Any] | None, gather: bool = False, padded: bool = False
) -> dict[str, Any]:
    decoder = build_model(
        tiny_config(**MOE),
        None,
        seed=3,
        lora=LoraSettings(**lora) if lora else None,
        balance=LOSSES,
        recompute=None if recompute is None else Recompute(use_reentrant=recompute == "PyLayer"),
        tp=mesh.tp,
        expert_parallel=expert_ranks(mesh, gather=gather, padded=padded),
        all_gather_object=mesh.all_gather_object,
    )
    parameters = named_trainable_parameters(decoder)
    for name, parameter in parameters.items():  # adapters of which B is not zero, so that A learns, too
        if name.endswith("lora_B"):
            whole = np.random.default_rng(len(name)).standard_normal(_whole_shape(parameter, name, mesh)) * 0.1
            parameter.set_value(mesh.tp.local_shard(whole, ERNIE4_5_MOE.placement(name).axis))
    ranks: Ranks = (
        SINGLE_PROCESS if mesh is SINGLE_PROCESS_MESH else LayoutRanks(mesh, parameters, decoder.config.architecture)
    )
    optimizer = build_optimizer(parameters, TrainingParameters(weight_decay=0.1))
    result: dict[str, Any] = {"losses": [], "norms": [], "figures": []}
    for step in range(STEPS):
        outcome = train_step(
            decoder,
            list(parameters.values()),
            optimizer,
            supervised(multi_token_pred_lambda=0.3),
            _batches(mesh, step),
            step=step,
            learning_rate=1e-2,
            max_grad_norm=0.5,
            ranks=ranks,
        )
        result["losses"].append(outcome.totals.loss)
        result["norms"].append(outcome.grad_norm)
        result["figures"].append([outcome.totals.sums[name] for name in sorted(outcome.totals.sums)])
    weights = {**named_weights(decoder), **parameters}
    return result | {"weights": {name: value.numpy() for name, value in weights.items()}}


def _whole_shape(parameter: paddle.Tensor, name: str, mesh: Mesh) -> list[int]:
    axis = ERNIE4_5_MOE.placement(name).axis
    return [size * (mesh.tp.size if number == axis else 1) for number, size in enumerate(parameter.shape)]


def _batches(mesh: Mesh, step: int) -> list[Batch]:
    """This rank's micro-batches of a step of four."""
    random = np.random.default_rng(step)
    batches = []
    for number, lengths in enumerate(LENGTHS[step % len(LENGTHS)]):
        row = [_sample(random, length) for length in lengths]
        batches.append(collate([row, row[:1]], [[number], [number]], pad_id=0))  # an even number of positions
    return batches[mesh.dp_rank :: mesh.topology.dp_world_size]


def _sample(random: np.random.Generator, length: int) -> Sample:
    ids = random.integers(1, VOCABULARY, length + 1)
    labels = ids[1:].copy()
    labels[: length // 3] = -100
    return Sample(ids[:-1].astype(np.int32), labels.astype(np.int32))

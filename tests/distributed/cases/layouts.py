"""A tiny model trained on a layout, by the step of the product: what each rank computes, against one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import paddle

from erniekit.config.sections.training import TrainingParameters
from erniekit.data.batch import Batch
from erniekit.data.collate import collate
from erniekit.data.templates.ernie import Sample
from erniekit.distributed.collectives import LayoutRanks
from erniekit.distributed.init import init_mesh
from erniekit.distributed.mesh import SINGLE_PROCESS_MESH, Mesh
from erniekit.distributed.replicated import ReplicatedParameterSync
from erniekit.distributed.topology import Topology
from erniekit.inference.generation import generate
from erniekit.inference.sampling import Sampling
from erniekit.model.builder import build_model
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.lora import named_trainable_parameters
from erniekit.model.randomness import Site
from erniekit.model.recompute import Recompute
from erniekit.training.collectives import SINGLE_PROCESS, Ranks
from erniekit.training.objectives.objective import supervised
from erniekit.training.optim.adamw import build_optimizer
from erniekit.training.step import train_step
from tests.distributed.cases.single_process import shared_results
from tests.model.tiny import tiny_config

STEPS = 3
NORM, SLICE = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
LENGTH = 24  # of a row
WAYS = ("parallel_output", "recompute", "sum_in_backward", "skip_c_identity")  # that change no number


def check_all(
    world: int, degrees: dict[str, Any], cases: dict[str, dict[str, Any]], results: str
) -> dict[str, dict[str, float]]:
    """`check` for several cases, by name; what one process computes is in the folder `results`, for all layouts."""
    mesh = init_mesh(Topology.from_degrees(world, **degrees), timeout=120)
    wanted = [{name: value for name, value in case.items() if name not in WAYS} for case in cases.values()]
    alone = shared_results(mesh, results, wanted, _train_alone)
    return {name: check(mesh, expected, **case) for (name, case), expected in zip(cases.items(), alone, strict=True)}


def check(
    mesh: Mesh,
    alone: dict[str, Any],
    model: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    objective: dict[str, Any] | None = None,
    parallel_output: bool = True,
    recompute: bool = False,
    sum_in_backward: bool = False,
    skip_c_identity: bool = False,
    hidden_dropout: float = 0.0,
) -> dict[str, float]:
    """Train on the layout; the largest differences of losses, norms and (relative) first gradients from `alone`."""
    own = _train(
        mesh, model or {}, lora, objective or {}, parallel_output, recompute, hidden_dropout, sum_in_backward,
        skip_c_identity,
    )  # fmt: skip
    architecture = tiny_config(**(model or {})).architecture
    worst = {"loss": 0.0, "norm": 0.0, "gradient": 0.0}
    for (loss, norm), (expected_loss, expected_norm) in zip(own["steps"], alone["steps"], strict=True):
        worst["loss"] = max(worst["loss"], abs(loss - expected_loss))
        worst["norm"] = max(worst["norm"], abs(norm - expected_norm) / expected_norm)
    assert own["gradients"].keys() == alone["gradients"].keys()
    for name, gradient in own["gradients"].items():
        whole = alone["gradients"][name]
        expected = mesh.tp.local_shard(whole, architecture.placement(name).axis)
        assert np.abs(expected).max() > 0 or "lora_A" in name, name
        relative = np.abs(gradient - expected).max() / max(np.abs(whole).max(), 1e-12)
        worst["gradient"] = max(worst["gradient"], float(relative))
    return worst


def _train_alone(
    model: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    objective: dict[str, Any] | None = None,
    hidden_dropout: float = 0.0,
) -> dict[str, Any]:
    return _train(SINGLE_PROCESS_MESH, model or {}, lora, objective or {}, hidden_dropout=hidden_dropout)


def _train(
    mesh: Mesh,
    model: dict[str, Any],
    lora: dict[str, Any] | None,
    objective: dict[str, Any],
    parallel_output: bool = True,
    recompute: bool = False,
    hidden_dropout: float = 0.0,
    sum_in_backward: bool = False,
    skip_c_identity: bool = False,
) -> dict[str, Any]:
    config = tiny_config(vocab_size=56, **model)
    decoder = build_model(
        config,
        None,
        seed=3,
        hidden_dropout=hidden_dropout,
        lora=LoraSettings(**lora) if lora is not None else None,
        recompute=Recompute(use_reentrant=True) if recompute else None,
        tp=replace(mesh.tp, skip_c_identity=skip_c_identity),
    )
    decoder.head.parallel_output = parallel_output
    parameters = named_trainable_parameters(decoder)
    ranks: Ranks = (
        SINGLE_PROCESS
        if mesh is SINGLE_PROCESS_MESH
        else LayoutRanks(mesh, parameters, decoder.config.architecture, sum_in_backward=sum_in_backward)
    )
    optimizer = build_optimizer(parameters, TrainingParameters(weight_decay=0.1))
    result: dict[str, Any] = {"steps": []}
    for step in range(STEPS):
        if step == 0:
            result["gradients"] = _gradients(
                decoder, parameters, ranks, _batches(mesh, config.vocab_size, 0), objective
            )
        outcome = train_step(
            decoder,
            list(parameters.values()),
            optimizer,
            supervised(**objective),
            _batches(mesh, config.vocab_size, step),
            step=step,
            learning_rate=1e-2,
            max_grad_norm=0.5,
            ranks=ranks,
        )
        result["steps"].append((outcome.totals.loss, outcome.grad_norm))
    return result


class _RecordingOptimizer:
    """An optimizer that only looks at the gradients."""

    def __init__(self, parameters: dict[str, paddle.Tensor]) -> None:
        self._parameters, self.seen = parameters, dict[str, np.ndarray]()

    def set_lr(self, rate: float) -> None: ...

    def step(self) -> None:
        self.seen = {name: parameter.grad.numpy().copy() for name, parameter in self._parameters.items()}

    def clear_grad(self, set_to_zero: bool) -> None:
        for parameter in self._parameters.values():
            parameter.clear_gradient(set_to_zero)


def _gradients(
    decoder: Any, parameters: dict[str, paddle.Tensor], ranks: Ranks, batches: list[Batch], objective: dict[str, Any]
) -> dict[str, np.ndarray]:
    keep = _RecordingOptimizer(parameters)
    values = list(parameters.values())
    train_step(decoder, values, keep, supervised(**objective), batches, step=0, learning_rate=0.0, ranks=ranks)  # type: ignore[arg-type]
    return keep.seen


def _batches(mesh: Mesh, vocabulary: int, step: int) -> list[Batch]:
    """This rank's micro-batches of a step of four rows."""
    random = np.random.default_rng(step)
    rows = []
    for row in range(4):
        first = int(random.integers(5, LENGTH - 5))
        lengths = [first, LENGTH - first - row]  # some rows end in padding
        rows.append([_sample(random, vocabulary, length) for length in lengths])
    pairs = [collate(rows[at : at + 2], [[at], [at + 1]], pad_id=0) for at in (0, 2)]
    return pairs[mesh.dp_rank :: mesh.topology.dp_world_size]


def _sample(random: np.random.Generator, vocabulary: int, length: int) -> Sample:
    ids = random.integers(1, vocabulary, length + 1)
    labels = ids[1:].copy()
    labels[: length // 3] = -100
    return Sample(ids[:-1].astype(np.int32), labels.astype(np.int32))


def keep_copies_equal(words: list[str]) -> dict[str, list[float]]:
    """Ranks whose copies have drifted apart take those of the first rank, as far as `words` say.

    Returns:
        Of a norm's gradient, value and first moment, and of a slice's value: the first number of each.
    """
    mesh = init_mesh(Topology.from_degrees(2, tensor=2), timeout=60)
    decoder = build_model(tiny_config(vocab_size=56), None, seed=3, tp=mesh.tp)
    parameters = {name: p for name, p in named_trainable_parameters(decoder).items() if name in (NORM, SLICE)}
    optimizer = build_optimizer(parameters, TrainingParameters())

    def state(kind: str, tensor: paddle.Tensor) -> paddle.Tensor:
        return optimizer._accumulators[kind][tensor.name]

    replicated_sync = ReplicatedParameterSync(
        decoder.config.architecture, parameters, state, mesh.group("tensor"), words
    )
    for parameter in parameters.values():
        for tensor in (parameter, state("moment1", parameter)):
            tensor.set_value(paddle.full_like(tensor, float(mesh.rank + 1)))
        parameter.grad = paddle.full_like(parameter, float(mesh.rank + 1))
    replicated_sync.before_update()
    replicated_sync.after_update()
    norm, own = parameters[NORM], parameters[SLICE]
    return {
        "sync_grad": [norm.grad[0].item()],
        "sync_param": [norm[0].item()],
        "sync_moment": [state("moment1", norm)[0].item()],
        "slice": [own[0, 0].item(), own.grad[0, 0].item()],
    }


def answer(degrees: dict[str, Any], model: dict[str, Any]) -> list[list[int]]:
    """Greedy answers of a divided model to prompts whose number and lengths no rank divides."""
    mesh = init_mesh(Topology.from_degrees(2, **degrees), timeout=60)
    prompts = [[5, 9, 2], [7], [11, 3, 4, 8, 20]]
    config, sampling = tiny_config(vocab_size=56, **model), Sampling(max_new_tokens=6, temperature=0.0)
    own = generate(build_model(config, None, seed=3, tp=mesh.tp), prompts, sampling)
    assert own == generate(build_model(config, None, seed=3), prompts, sampling)
    return own


def draw_masks(degrees: dict[str, Any]) -> dict[str, list[int]]:
    """The keys that seed a layer's dropout masks on this rank, for what ranks have alike and for what they divide."""
    mesh = init_mesh(Topology.from_degrees(2, **degrees), timeout=60)
    seen: dict[str, list[int]] = {}
    decoder = build_model(tiny_config(vocab_size=56), None, seed=3, hidden_dropout=0.1, tp=mesh.tp)
    draw = decoder.randomness.key

    def noted(layer: int, site: Site, shard: int = 0) -> tuple[int, ...]:
        seen[site.name] = list(draw(layer, site, shard))
        return draw(layer, site, shard)

    decoder.randomness.key = noted  # type: ignore[method-assign]
    decoder.train()
    (batch, *_) = _batches(SINGLE_PROCESS_MESH, 56, 0)
    supervised().loss(decoder, batch)
    return seen

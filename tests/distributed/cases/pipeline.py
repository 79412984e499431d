"""Pipelines against the same computation in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.distributed import fleet

from erniekit.config.sections.dpo import DpoParameters
from erniekit.config.sections.moe import MoeParameters
from erniekit.config.sections.training import TrainingParameters
from erniekit.data.batch import Batch
from erniekit.data.collate import collate
from erniekit.data.pairs import EncodedAnswer, join_pair
from erniekit.data.templates.ernie import Sample
from erniekit.distributed import cpu_backend
from erniekit.distributed.collectives import LayoutRanks
from erniekit.distributed.decoder_pipeline import DecoderPipeline, build_pipeline_stage
from erniekit.distributed.init import init_mesh
from erniekit.distributed.mesh import SINGLE_PROCESS_MESH, Mesh
from erniekit.distributed.pipeline import Pipeline, PipelineOptions
from erniekit.distributed.topology import Topology
from erniekit.model.builder import build_model
from erniekit.model.decoder import Decoder, last_stage_needs_embedding
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.lora import add_adapters, named_adapter_weights, named_trainable_parameters
from erniekit.model.recompute import Recompute
from erniekit.training.collectives import SINGLE_PROCESS, Ranks
from erniekit.training.evaluation import evaluate
from erniekit.training.objectives.forward import MicroBatchLoss
from erniekit.training.objectives.objective import Objective, supervised
from erniekit.training.objectives.preference import answer_log_probabilities, preference, reference_logps_function
from erniekit.training.objectives.reference import AdapterReference, FrozenReference
from erniekit.training.optim.adamw import build_optimizer
from erniekit.training.step import NotFiniteError, train_step
from tests.model.tiny import tiny_config

WIDTH = 5
STEPS = 5


class Chain:
    """Linear maps one after another, one for each run, with the same weights on all ranks."""

    def __init__(self, runs: int, lengths: list[int]) -> None:
        random = np.random.default_rng(0)
        self.weights = [
            paddle.to_tensor(random.standard_normal((WIDTH, WIDTH)), "float32", stop_gradient=False)
            for _ in range(runs)
        ]
        self.batches = [random.standard_normal((1, length, WIDTH)).astype("float32") for length in lengths]
        self.positions = [random.integers(0, 9, (1, length)) for length in lengths]
        self.losses: dict[int, float] = {}
        self.now = -1

    def begin_micro_batch(self, number: int) -> None:
        self.now = number

    def inputs(self, number: int) -> tuple[Tensor, ...]:
        return paddle.to_tensor(self.batches[number]), paddle.to_tensor(self.positions[number])

    def forward(self, run: int, number: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, positions = tensors
        assert number == self.now
        np.testing.assert_array_equal(positions.numpy(), self.positions[number])
        return paddle.tanh(paddle.matmul(x, self.weights[run])) * (1 + 0.1 * positions.unsqueeze(-1)), positions

    def loss(self, number: int, tensors: tuple[Tensor, ...]) -> Tensor:
        loss = tensors[0].square().sum() / 7
        self.losses[number] = loss.item()
        return loss

    def gradients(self) -> list[np.ndarray | None]:
        return [None if weight.grad is None else weight.grad.numpy() for weight in self.weights]


def run_chain(num_model_chunks: int, lengths: list[int], options: dict[str, bool], tensor: int = 1) -> list[str]:
    """A pass forward, one forward and backward, and another of both; what a rank holds equals the single process's."""
    cpu_backend.apply()
    strategy = fleet.DistributedStrategy()
    num_stages = dist.ParallelEnv().world_size // tensor
    strategy.hybrid_configs = {"dp_degree": 1, "pp_degree": num_stages, "mp_degree": tensor}
    fleet.init(is_collective=True, strategy=strategy)
    pipeline = Pipeline(num_model_chunks, PipelineOptions(**options))
    runs = pipeline.num_stages * num_model_chunks

    alone = Chain(runs, lengths)
    for number in range(len(lengths)):
        alone.begin_micro_batch(number)
        tensors = alone.inputs(number)
        for run in range(runs):
            tensors = alone.forward(run, number, tensors)
        alone.loss(number, tensors).backward()

    chain = Chain(runs, lengths)
    shapes = tuple(lengths)
    for times in (1, 2):
        chain.losses.clear()
        pipeline.forward(chain, len(lengths), shapes)
        assert chain.losses == (alone.losses if pipeline.is_last else {})
        pipeline.train(chain, len(lengths), shapes)
        for run, (own, expected) in enumerate(zip(chain.gradients(), alone.gradients(), strict=True)):
            if run % pipeline.num_stages == pipeline.pp_stage:
                np.testing.assert_allclose(own, times * expected, rtol=1e-5, atol=1e-6)
            else:
                assert own is None
    return [type(engine).__name__ for engine in pipeline._engines.values()]


def check_decoder(
    world: int,
    degrees: dict[str, Any],
    model: dict[str, Any] | None = None,
    method: str | list[int] = "layer:DecoderLayer",
    options: dict[str, bool] | None = None,
    build: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    recompute: str = "",
    loss_type: str = "",
    accumulation: int = 4,
) -> dict[str, float]:
    """A decoder trained in stages and alone: the largest differences of losses, norms, figures and first gradients."""
    mesh = init_mesh(Topology.from_degrees(world, **degrees), timeout=60)
    settings = {
        "model": {"vocab_size": 56, "num_hidden_layers": 4, **(model or {})},
        "build": dict(build or {}) | ({"recompute": Recompute(recompute == "PyLayer")} if recompute else {}),
        "lora": lora,
        "loss_type": loss_type,
        "accumulation": accumulation,
    }
    if "balance" in settings["build"]:
        settings["build"]["balance"] = MoeParameters(**settings["build"]["balance"])
    cut = tuple(method) if isinstance(method, list) else method
    own = _train(mesh, cut, PipelineOptions(**(options or {})), **settings)
    alone = _train(SINGLE_PROCESS_MESH, cut, PipelineOptions(), **settings)
    architecture = tiny_config(**settings["model"]).architecture
    worst = {"figures": 0.0, "norm": 0.0, "gradient": 0.0}
    for found, expected in zip(own["steps"], alone["steps"], strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            kind = "norm" if name == "norm" else "figures"
            worst[kind] = max(worst[kind], abs(found[name] - value) / max(1.0, abs(value)))
    for name, gradient in own["gradients"].items():
        whole = alone["gradients"][name]
        expected = mesh.tp.local_shard(whole, architecture.placement(name).axis)
        assert np.abs(expected).max() > 0 or "lora_A" in name, name
        relative = np.abs(gradient - expected).max() / max(np.abs(whole).max(), 1e-12)
        worst["gradient"] = max(worst["gradient"], float(relative))
    worst["names"] = len(own["gradients"])
    worst["all"] = len(alone["gradients"])
    return worst


def _train(
    mesh: Mesh,
    method: str | tuple[int, ...],
    options: PipelineOptions,
    *,
    model: dict[str, Any],
    build: dict[str, Any],
    lora: dict[str, Any] | None,
    loss_type: str,
    accumulation: int,
) -> dict[str, Any]:
    config = tiny_config(**model)
    pipeline_stage = build_pipeline_stage(config.num_hidden_layers, mesh, method)

    def built() -> Decoder:
        return build_model(config, None, seed=3, tp=mesh.tp, pipeline_stage=pipeline_stage, **build)

    decoder = built()
    if lora is not None:
        add_adapters(decoder, LoraSettings(**lora), seed=3, all_gather_object=mesh.all_gather_object)
        for name, weight in named_adapter_weights(decoder).items():  # so that they have an effect from the start
            weight.set_value(np.random.default_rng(len(name)).standard_normal(weight.shape).astype("float32") * 0.1)
    decoder.train()
    parameters = named_trainable_parameters(decoder)
    ranks: Ranks = SINGLE_PROCESS
    if mesh is not SINGLE_PROCESS_MESH:
        pipeline = DecoderPipeline(mesh, options, tied_embeddings=last_stage_needs_embedding(config))
        ranks = LayoutRanks(mesh, parameters, decoder.config.architecture, pipeline=pipeline)
    objective = _objective(decoder, built, ranks, loss_type, lora is not None)
    optimizer = build_optimizer(parameters, TrainingParameters(weight_decay=0.1))
    result: dict[str, Any] = {"steps": []}
    for step in range(STEPS):
        batches = _batches(mesh, step, accumulation, pairs=bool(loss_type))
        if step == 0:
            keep = RecordingOptimizer(parameters)
            train_step(
                decoder, list(parameters.values()), keep, objective, batches, step=0, learning_rate=0.0, ranks=ranks
            )
            result["gradients"] = keep.seen
        outcome = train_step(
            decoder,
            list(parameters.values()),
            optimizer,
            objective,
            batches,
            step=step,
            learning_rate=1e-2,
            max_grad_norm=0.5,
            ranks=ranks,
        )
        metrics = {"loss": outcome.totals.loss, "norm": outcome.grad_norm, **outcome.totals.metrics}
        if step % 2:
            evaluated = evaluate(decoder, _Plan(mesh, bool(loss_type)), objective, ranks=ranks)
            metrics |= {"eval loss": evaluated.loss, **{f"eval {name}": of for name, of in evaluated.metrics.items()}}
        result["steps"].append(metrics)
    return result


def _objective(decoder: Decoder, built: Any, ranks: Ranks, loss_type: str, adapters: bool) -> Objective:
    if not loss_type:
        return supervised(multi_token_pred_lambda=0.3)
    measure = reference_logps_function(answer_log_probabilities(), ranks)
    reference = (
        AdapterReference(decoder, measure) if adapters else FrozenReference(built(), decoder, measure, updated=False)
    )
    return preference(DpoParameters(loss_type=loss_type, beta=0.3, sft_loss_ratio=0.2), reference)


class RecordingOptimizer:
    """An optimizer that only looks at the gradients."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        self._parameters, self.seen = parameters, dict[str, np.ndarray]()

    def set_lr(self, rate: float) -> None: ...

    def step(self) -> None:
        self.seen = {name: weight.grad.numpy() for name, weight in self._parameters.items() if not weight.stop_gradient}

    def clear_grad(self, set_to_zero: bool) -> None:
        for parameter in self._parameters.values():
            parameter.clear_gradient(set_to_zero)


class _Plan:
    """Five batches to evaluate, which ranks with other data divide."""

    def __init__(self, mesh: Mesh, pairs: bool) -> None:
        self.dp_rank, self.dp_world_size = mesh.dp_rank, mesh.topology.dp_world_size
        self._batches = _batches(SINGLE_PROCESS_MESH, 99, 6, pairs=pairs)

    def steps_in_epoch(self, epoch: int) -> int:
        return len(self._batches)

    def source_of(self, step: int) -> str:
        return "held out"

    def micro_batches(self, step: int) -> list[Batch]:
        return [self._batches[step]]

    def local_steps(self, stop: int) -> Any:
        numbers = range(self.dp_rank, stop, self.dp_world_size)
        return ((step, self._batches[step]) for step in numbers)


def _batches(mesh: Mesh, step: int, accumulation: int, *, pairs: bool) -> list[Batch]:
    """This rank's part of the micro-batches of a step, each of its own length; the last one has fewer rows."""
    random = np.random.default_rng(step)
    made = []
    for number in range(accumulation):
        rows = [[_sample(random, pairs) for _ in range(2)] for _ in range(2 if number < accumulation - 1 else 1)]
        first = range(4 * number, 4 * number + 2 * len(rows), 2)
        made.append(collate(rows, [[at, at + 1] for at in first], 0, pairs=pairs))
    return made[mesh.dp_rank :: mesh.topology.dp_world_size]


def _sample(random: np.random.Generator, pair: bool) -> Sample:
    if pair:
        prompt, chosen, rejected = (random.integers(1, 56, int(size)).tolist() for size in random.integers(2, 8, 3))
        return join_pair(prompt, EncodedAnswer(chosen, chosen), EncodedAnswer(rejected, rejected), 1.0)
    ids = random.integers(1, 56, int(random.integers(6, 16)))
    labels = ids[1:].copy()
    labels[: len(labels) // 3] = -100
    return Sample(ids[:-1].astype(np.int32), labels.astype(np.int32))


def break_a_gradient(number: int) -> list[int]:
    """A micro-batch whose loss is a number and whose gradient is none, on the last stage only; what a step blames."""
    mesh = init_mesh(Topology.from_degrees(2, pipeline=2), timeout=60)
    config = tiny_config(vocab_size=56)
    decoder = build_model(
        config, None, seed=3, pipeline_stage=build_pipeline_stage(config.num_hidden_layers, mesh, "layer:DecoderLayer")
    )
    decoder.train()
    parameters = named_trainable_parameters(decoder)
    ranks = LayoutRanks(
        mesh, parameters, decoder.config.architecture, pipeline=DecoderPipeline(mesh, tied_embeddings=True)
    )
    batches = _batches(mesh, 0, 4, pairs=False)
    objective = supervised()

    def loss_head(stage: Decoder, hidden: Tensor, context: Any, batch: Batch, reference_input: Any) -> MicroBatchLoss:
        result = objective.loss.loss_head(stage, hidden, context, batch, reference_input)
        slope = paddle.sqrt(0 * stage.norm.weight.sum()) if batch.samples == batches[number].samples else 0.0
        return MicroBatchLoss(result.loss_sum + slope, result.metric_sums)

    broken = replace(objective, loss=replace(objective.loss, loss_head=loss_head))
    try:
        train_step(
            decoder,
            list(parameters.values()),
            RecordingOptimizer(parameters),
            broken,
            batches,
            step=0,
            learning_rate=0.0,
            ranks=ranks,
        )
    except NotFiniteError as error:
        assert error.what == "the gradient norm"
        return list(error.micro_batches)
    raise AssertionError("nothing was noticed")

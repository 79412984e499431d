"""A model and a data plan small enough for hundreds of steps a second, with the interfaces of the real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from safetensors.numpy import load_file, save_file

from erniekit.config import Config
from erniekit.config.registry import PARAMETERS
from erniekit.config.sections.training import TrainingParameters
from erniekit.training.callbacks import Callback
from erniekit.training.checkpoint.resume import RunIdentity
from erniekit.training.collectives import forward_only_no_pipelining
from erniekit.training.evaluation import evaluate
from erniekit.training.objectives.objective import MicroBatchLoss, Objective
from erniekit.training.optim.adamw import build_optimizer
from erniekit.training.saving import RunFolder
from erniekit.training.trainer import Trainer

VOCABULARY, HIDDEN, PADDING = 17, 8, -100


@dataclass(frozen=True)
class FakeBatch:
    input_ids: np.ndarray
    labels: np.ndarray
    samples: tuple[tuple[int, ...], ...]

    @property
    def target_count(self) -> int:
        return int((self.labels != PADDING).sum())

    audio_seconds = 0.0

    @property
    def token_count(self) -> int:
        return int(self.input_ids.size) if any(self.samples) else 0


class FakePlan:
    """Sequences of different lengths; a step takes `batch_size * accumulation` of them in a seeded order."""

    def __init__(self, samples: int = 12, *, batch_size: int = 2, accumulation: int = 2, seed: int = 1) -> None:
        generator = np.random.default_rng(7)
        self.sequences = [generator.integers(0, VOCABULARY, generator.integers(3, 9)) for _ in range(samples)]
        self.trained_from = [int(generator.integers(1, 3)) for _ in range(samples)]
        self.batch_size, self.accumulation, self.seed = batch_size, accumulation, seed

    def steps_in_epoch(self, epoch: int) -> int:
        return len(self.sequences) // (self.batch_size * self.accumulation)

    def epoch_of(self, step: int) -> float:
        return step / self.steps_in_epoch(0)

    def source_of(self, step: int) -> str:
        return "held out"

    dp_rank, dp_world_size = 0, 1

    def local_steps(self, stop: int) -> Iterator[tuple[int, FakeBatch]]:
        nothing = FakeBatch(np.zeros((1, 1), np.int64), np.full((1, 1), PADDING), ((),))
        for first in range(0, stop, self.dp_world_size):
            step = first + self.dp_rank
            yield (step, self.micro_batches(step)[0]) if step < stop else (stop - 1, nothing)

    def micro_batches(self, step: int) -> list[FakeBatch]:
        epoch, index = divmod(step, self.steps_in_epoch(0))
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.sequences))
        size = self.batch_size * self.accumulation
        chosen = order[index * size : (index + 1) * size]
        return [self.batch(part) for part in np.split(chosen, self.accumulation)]

    def batch(self, indices: np.ndarray) -> FakeBatch:
        width = max(len(self.sequences[i]) for i in indices) - 1
        inputs = np.zeros((len(indices), width), dtype=np.int64)
        labels = np.full((len(indices), width), PADDING, dtype=np.int64)
        for row, i in enumerate(indices):
            sequence, start = self.sequences[i], self.trained_from[i]
            inputs[row, : len(sequence) - 1] = sequence[:-1]
            labels[row, start - 1 : len(sequence) - 1] = sequence[start:]
        return FakeBatch(inputs, labels, tuple((int(i),) for i in indices))


class Randomness:
    """Seeds every draw from (seed, step, micro-batch), like the decoder's."""

    def __init__(self, seed: int) -> None:
        self.seed, self.step, self.micro_batch, self.dropout_scale = seed, 0, 0, 1.0

    def set(self, *, step: int, micro_batch: int, dropout_scale: float) -> None:
        self.step, self.micro_batch, self.dropout_scale = step, micro_batch, dropout_scale

    def keep(self, shape: list[int], probability: float) -> paddle.Tensor:
        generator = np.random.default_rng((self.seed, self.step, self.micro_batch))
        return paddle.to_tensor((generator.random(shape) >= probability * self.dropout_scale).astype(np.float32))


class FakeModel(paddle.nn.Layer):
    """Embedding, one hidden layer with a norm, and a head. Parameters have Hugging Face like names."""

    def __init__(self, *, seed: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        generator = np.random.default_rng(seed)
        self.shapes = {
            "model.embed_tokens.weight": [VOCABULARY, HIDDEN],
            "model.layers.0.mlp.weight": [HIDDEN, HIDDEN],
            "model.layers.0.mlp.bias": [HIDDEN],
            "model.norm.weight": [HIDDEN],
            "lm_head.weight": [HIDDEN, VOCABULARY],
        }
        self.named: dict[str, paddle.Tensor] = {}
        for name, shape in self.shapes.items():
            parameter = self.create_parameter(shape)
            parameter.set_value((generator.standard_normal(shape) * 0.5).astype(np.float32))
            self.add_parameter(name.replace(".", "_"), parameter)
            self.named[name] = parameter
        self.dropout = dropout
        self.randomness = Randomness(seed)

    def forward(self, input_ids: paddle.Tensor) -> paddle.Tensor:
        weight = self.named
        hidden = F.embedding(input_ids, weight["model.embed_tokens.weight"])
        hidden = F.silu(F.linear(hidden, weight["model.layers.0.mlp.weight"], weight["model.layers.0.mlp.bias"]))
        if self.training and self.dropout:
            hidden = hidden * self.randomness.keep(hidden.shape, self.dropout)
        scale = paddle.rsqrt((hidden * hidden).mean(-1, keepdim=True) + 1e-6)
        return F.linear(hidden * scale * weight["model.norm.weight"], weight["lm_head.weight"])

    def begin_micro_batch(self, *, step: int, micro_batch: int, dropout_scale: float, loss_weight: float) -> None:
        self.randomness.set(step=step, micro_batch=micro_batch, dropout_scale=dropout_scale)
        self.shares = [*(self.shares if micro_batch else []), loss_weight]

    def end_step(self, *, skipped: bool = False) -> None:
        self.shares_of_step = tuple(self.shares)

    def save(self, folder: Path) -> None:
        save_file({name: tensor.numpy() for name, tensor in self.named.items()}, folder / "model.safetensors")

    def load(self, folder: Path) -> None:
        for name, array in load_file(folder / "model.safetensors").items():
            self.named[name].set_value(array)

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: tensor.numpy() for name, tensor in self.named.items()}


@dataclass(frozen=True)
class FakeLoss:
    """A loss of a model that is no decoder: what one process calls, and no head for the last stage of a pipeline."""

    function: Callable[[FakeModel, FakeBatch], MicroBatchLoss]

    def __call__(self, model: FakeModel, batch: FakeBatch) -> MicroBatchLoss:
        return self.function(model, batch)

    def units(self, batch: FakeBatch) -> int:
        return batch.target_count


def _cross_entropy(model: FakeModel, batch: FakeBatch) -> MicroBatchLoss:
    logits = model(paddle.to_tensor(batch.input_ids)).reshape([-1, VOCABULARY])
    labels = paddle.to_tensor(batch.labels).reshape([-1])
    loss = F.cross_entropy(logits, labels, reduction="sum", ignore_index=PADDING)
    correct = ((logits.argmax(-1) == labels) & (labels != PADDING)).astype("float32").sum()
    return MicroBatchLoss(loss, {"token_accuracy": correct})


FAKE_OBJECTIVE = Objective(FakeLoss(_cross_entropy), "target tokens", perplexity=True)


def identity(**changes: Any) -> RunIdentity:
    values: dict[str, Any] = {
        "seed": 1,
        "data_fingerprint": "abc",
        "batches": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        "cpu_settings": {"MKL_DEBUG_CPU_TYPE": "7", "cpu_kernels": "paddle"},
        "versions": {"paddle": "3.3.1"},
    }
    return RunIdentity(**(values | changes))


def fake_config(output_dir: Path, **parameters: Any) -> Config:
    """A configuration of a run over fakes: nothing is logged often, evaluated or saved unless `parameters` say so."""
    values: dict[str, Any] = {
        "model_name_or_path": "fake",
        "output_dir": str(output_dir),
        "train_dataset_path": "fake.jsonl",
        "do_eval": True,
        "eval_dataset_path": "fake.jsonl",
        "evaluation_strategy": "no",
        "max_evaluate_steps": -1,
        "logging_steps": 10,
        "learning_rate": 0.05,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
    }
    return Config.from_mapping(values | parameters)


def fake_trainer(output_dir: Path, *, total_steps: int = 9, dropout: float = 0.3, **changes: Any) -> Trainer:
    """A trainer over the fakes. `changes` are parameters, fields of Trainer or of its folder, or `evaluation_plan`."""
    parameters = {name: changes.pop(name) for name in [*changes] if name in PARAMETERS}
    evaluation_plan = changes.pop("evaluation_plan", None)
    output_dir.mkdir(parents=True, exist_ok=True)
    model = changes.pop("model", None) or FakeModel(dropout=dropout)
    parts: dict[str, Any] = {
        "model": model,
        "parameters": model.named,
        "optimizer": build_optimizer(model.named, TrainingParameters(weight_decay=0.1)),
        "plan": FakePlan(),
        "objective": FAKE_OBJECTIVE,
        "config": fake_config(output_dir, **parameters),
        "total_steps": total_steps,
    }
    if evaluation_plan is not None:
        parts["run_evaluation"] = lambda: evaluate(model, evaluation_plan, FAKE_OBJECTIVE)
    folder_parts = {field.name for field in fields(RunFolder)} - {field.name for field in fields(Trainer)}
    of_folder = {name: changes.pop(name) for name in [*changes] if name in folder_parts}
    parts |= changes
    shared = {name: parts[name] for name in ("config", "parameters", "optimizer", "ranks") if name in parts}
    defaults = {
        "identity": identity(),
        "resolved_config": {"learning_rate": 0.05},
        "write_model": model.save,
        "extra_state": parts["objective"].extra_state,
    }
    return Trainer(**parts, folder=RunFolder(**(defaults | shared | of_folder)))


class Recorder(Callback):
    """Collects the records of a run."""

    def __init__(self) -> None:
        self.steps: list[dict] = []
        self.logs: list[dict] = []
        self.evaluations: list[dict] = []
        self.saved: list[Path] = []

    def on_step(self, record: dict) -> None:
        self.steps.append(without_speed(record))

    def on_log(self, record: dict) -> None:
        self.logs.append(without_speed(record))

    def on_evaluate(self, record: dict) -> None:
        self.evaluations.append({name: value for name, value in record.items() if name != "eval_seconds"})

    def on_save(self, folder: Path) -> None:
        self.saved.append(folder)


def without_speed(record: dict) -> dict:
    return {name: value for name, value in record.items() if name != "tokens_per_second"}


class RecordingRanks:
    """A rank that is alone, and keeps what it was asked to sum or to exchange."""

    num_forward_batches = 1
    forward_only = staticmethod(forward_only_no_pipelining)

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def sum(self, values: np.ndarray) -> np.ndarray:
        self.asked.append(values)
        return values

    def all_gather_object(self, value: Any) -> list[Any]:
        self.asked.append(value)
        return [value]


class ReplayedRanks(RecordingRanks):
    """A rank among others that were asked for `asked`, one list for each: it has what all of them were asked for."""

    def __init__(self, *asked: list[Any]) -> None:
        super().__init__()
        self._others = iter(zip(*asked, strict=True))

    def sum(self, values: np.ndarray) -> np.ndarray:
        return np.sum(next(self._others), axis=0)

    def all_gather_object(self, value: Any) -> list[Any]:
        return list(next(self._others))

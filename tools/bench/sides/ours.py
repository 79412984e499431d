"""One training step of this project on the documents of a benchmark, by the functions that `erniekit train` calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[3])]
import workload
from turns import Step, serve

from erniekit.environment import import_paddle

import_paddle()

from erniekit.config.sections.dpo import DpoParameters
from erniekit.config.sections.training import TrainingParameters
from erniekit.data.batch import Batch
from erniekit.data.collate import collate
from erniekit.data.pairs import EncodedAnswer, join_pair
from erniekit.data.templates.ernie import Sample
from erniekit.model import bf16
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.cpu_precision import CpuBFloat16
from erniekit.model.lora.config import LoraSettings
from erniekit.model.lora.lora import named_trainable_parameters
from erniekit.training.objectives.objective import Objective, supervised
from erniekit.training.objectives.preference import answer_log_probabilities, preference, reference_logps_function
from erniekit.training.objectives.reference import FrozenReference
from erniekit.training.optim.adamw import build_optimizer
from erniekit.training.step import StepResult, train_step


def _sample(document: np.ndarray) -> Sample:
    labels = np.append(workload.labels_of(document)[1:], workload.NO_LABEL)
    return Sample(document.astype(np.int32), labels.astype(np.int32))


def packed(documents: Sequence[np.ndarray]) -> Batch:
    """One row with all documents."""
    return collate([[_sample(document) for document in documents]], [range(len(documents))], 0)


def packed_pairs(length: int, step: int, vocabulary: int) -> Batch:
    """One row with the pairs of a step, each prompt once."""
    samples = [
        join_pair(
            prompt.tolist(),
            EncodedAnswer(chosen.tolist(), chosen.tolist()),
            EncodedAnswer(rejected.tolist(), rejected.tolist()),
        )
        for prompt, chosen, rejected in workload.pairs(length, step, vocabulary)
    ]
    return collate([samples], [range(len(samples))], 0, pairs=True)


def useful_tokens(stage: str, length: int, step: int, vocabulary: int) -> int:
    """Tokens of a step's documents, or of its pairs with each prompt counted once."""
    if stage == "dpo":
        return sum(len(part) for pair in workload.pairs(length, step, vocabulary) for part in pair)
    return length


def make_step(config: dict[str, Any], folder: Path | None, stage: str, length: int, dtype: str = "float32") -> Step:
    """A step of stage "sft", "lora" or "dpo" over `length` tokens; weights from a folder, or random ones.

    Args:
        dtype: "bfloat16" is `bf16: true`, with float32 where this processor is faster in it.
    """
    batch_of, advance = make_parts(config, folder, stage, length, dtype)

    def step(number: int) -> tuple[float, int]:
        batch = batch_of(number)
        return advance(number, batch).totals.loss, useful_tokens(stage, length, number, config["vocab_size"])

    return step


def make_parts(
    config: dict[str, Any], folder: Path | None, stage: str, length: int, dtype: str = "float32"
) -> tuple[Callable[[int], Batch], Callable[[int, Batch], StepResult]]:
    """The two parts of a step: its batch, and the update from it."""
    model_config, vocabulary = ModelConfig.from_json(config), config["vocab_size"]
    lora = LoraSettings(rank=workload.LORA_RANK, alpha=2 * workload.LORA_RANK) if stage == "lora" else None
    model = build_model(model_config, folder, lora=lora)
    model.train()
    if dtype == "bfloat16" and bf16.is_faster()[0]:
        CpuBFloat16().apply_to(model)
    objective: Objective
    if stage == "dpo":
        heads = {"fused_head": False, "sparse_head": True, "dense_mask": False}
        measure = reference_logps_function(answer_log_probabilities(**heads))
        reference = FrozenReference(build_model(model_config, folder), model, measure, updated=False)
        objective = preference(DpoParameters(loss_type="sigmoid", beta=0.1), reference, **heads)
    else:
        objective = supervised(fused_head=True)
    parameters = named_trainable_parameters(model)
    optimizer = build_optimizer(parameters, TrainingParameters(weight_decay=0.01))

    def batch_of(number: int) -> Batch:
        if stage == "dpo":
            return packed_pairs(length, number, vocabulary)
        return packed(workload.pack(length, number, vocabulary))

    def advance(number: int, batch: Batch) -> StepResult:
        return train_step(
            model, list(parameters.values()), optimizer, objective, [batch],
            step=number, learning_rate=1e-4, max_grad_norm=1.0,
        )  # fmt: skip

    return batch_of, advance


if __name__ == "__main__":
    settings = workload.arguments()
    config = workload.read_config(settings.folder)
    serve(make_step(config, settings.folder, settings.stage, settings.length, settings.dtype))

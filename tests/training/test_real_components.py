"""The loop with the real decoder, data and plan: layouts of a step agree, and resuming is exact to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from erniekit.config.sections.training import TrainingParameters
from erniekit.data.conversation import Source
from erniekit.data.dataset import Dataset
from erniekit.data.eval_sampler import EvaluationPlan
from erniekit.data.open_dataset import open_dataset
from erniekit.data.sampler import StepPlan
from erniekit.data.templates.ernie import chat_template
from erniekit.data.tokenizers.tokenizer import load_tokenizer
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.builder import build_model
from erniekit.model.weights import named_weights, save_model_folder
from erniekit.training.checkpoint.resume import Start, open_output_folder
from erniekit.training.evaluation import evaluate
from erniekit.training.objectives.objective import supervised
from erniekit.training.optim.adamw import build_optimizer
from erniekit.training.saving import RunFolder
from erniekit.training.step import train_step
from erniekit.training.trainer import Trainer

from .fakes import Recorder, fake_config, identity
from .test_resume import KillAt, KilledError

MODEL = Path("examples/models/tiny-ernie")
DATA = Path("examples/data/sft-eval.jsonl")
SEQUENCE = 96


def tiny_config() -> ModelConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    return replace(ModelConfig.from_folder(MODEL), **sizes, num_attention_heads=2, num_key_value_heads=1)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The first 40 held-out samples."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "few.jsonl").write_text("".join(DATA.read_text().splitlines(keepends=True)[:40]))
    tokenizer = load_tokenizer(MODEL)
    return open_dataset(
        [Source(folder / "few.jsonl", "erniekit", 1.0)],
        tokenizer,
        chat_template(tokenizer),
        max_seq_len=SEQUENCE,
        cache_dir=folder / "cache",
    )


def make_plan(dataset: Dataset, *, packing: bool, batch_size: int, accumulation: int) -> StepPlan:
    return StepPlan(
        dataset,
        max_seq_len=SEQUENCE,
        packing=packing,
        greedy=True,
        window=1000,
        batch_size=batch_size,
        accumulation=accumulation,
        seed=5,
    )


@pytest.mark.parametrize(
    ("packing", "batch_size", "accumulation"),
    [(False, 10, 4), (False, 1, 40), (True, 40, 1), (True, 1, 40), (True, 4, 10)],
)
def test_one_epoch_in_one_step_gives_the_same_update_in_every_layout(
    dataset: Dataset, packing: bool, batch_size: int, accumulation: int
) -> None:
    def update(plan: StepPlan) -> tuple[float, float, dict[str, np.ndarray]]:
        assert plan.steps_in_epoch(0) == 1
        model = build_model(tiny_config(), None, seed=3)
        parameters = named_weights(model)
        result = train_step(
            model,
            list(parameters.values()),
            build_optimizer(parameters, TrainingParameters(weight_decay=0.1, adam_epsilon=1e-3)),
            supervised(),
            plan.micro_batches(0),
            step=0,
            learning_rate=0.1,
            max_grad_norm=1.0,
        )
        weights = {name: value.numpy() for name, value in parameters.items()}
        return result.totals.loss, result.grad_norm, weights

    loss, norm, weights = update(make_plan(dataset, packing=False, batch_size=40, accumulation=1))
    own_loss, own_norm, own_weights = update(
        make_plan(dataset, packing=packing, batch_size=batch_size, accumulation=accumulation)
    )
    assert own_loss == pytest.approx(loss, rel=1e-6)
    assert own_norm == pytest.approx(norm, rel=1e-5)
    for name, value in weights.items():
        np.testing.assert_allclose(own_weights[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("option", ["fused_head", "sparse_head", "dense_mask"])
def test_options_of_the_supervised_objective_change_no_figure(dataset: Dataset, option: str) -> None:
    batch = make_plan(dataset, packing=True, batch_size=4, accumulation=1).micro_batches(0)[0]
    results = []
    for objective in (supervised(), supervised(**{option: True})):
        model = build_model(tiny_config(), None, seed=3)
        part = objective.loss(model, batch)
        part.loss_sum.backward()
        gradients = {name: parameter.grad.numpy() for name, parameter in named_weights(model).items()}
        results.append((float(part.loss_sum), float(part.metric_sums["token_accuracy"]), gradients))
    (loss, correct, gradients), (own_loss, own_correct, own_gradients) = results
    assert own_loss == pytest.approx(loss, rel=1e-5)
    assert own_correct == correct
    for name, gradient in gradients.items():
        np.testing.assert_allclose(own_gradients[name], gradient, rtol=1e-3, atol=1e-4, err_msg=name)


def make_trainer(output_dir: Path, dataset: Dataset, weights: Path | None, *callbacks: object) -> Trainer:
    output_dir.mkdir(parents=True, exist_ok=True)
    model = build_model(tiny_config(), weights, seed=3, hidden_dropout=0.2, attention_dropout=0.1)
    parameters = named_weights(model)
    plan = make_plan(dataset, packing=True, batch_size=2, accumulation=2)
    held_out = EvaluationPlan(dataset, max_seq_len=SEQUENCE, packing=True, greedy=True, window=1000, batch_size=3)
    config = fake_config(
        output_dir,
        learning_rate=0.01,
        save_strategy="steps",
        save_steps=5,
        logging_steps=1,
        evaluation_strategy="steps",
        eval_steps=3,
        dropout_warmup_steps=3,
    )
    optimizer = build_optimizer(parameters, TrainingParameters(weight_decay=0.1))
    folder = RunFolder(
        config=config,
        identity=identity(data_fingerprint=dataset.fingerprint),
        resolved_config={},
        parameters=parameters,
        optimizer=optimizer,
        write_model=lambda folder: save_model_folder(model, folder, []),
    )
    return Trainer(
        model=model,
        parameters=parameters,
        optimizer=optimizer,
        plan=plan,
        objective=supervised(),
        config=config,
        total_steps=10,
        folder=folder,
        run_evaluation=lambda: evaluate(model, held_out, supervised()),
        callbacks=callbacks,
    )


def test_killed_in_mid_epoch_and_resumed_with_packing_and_dropout(tmp_path: Path, dataset: Dataset) -> None:
    whole, first, second = Recorder(), Recorder(), Recorder()
    uninterrupted = make_trainer(tmp_path / "whole", dataset, None, whole)
    uninterrupted.fit(Start(None))
    with pytest.raises(KilledError):
        make_trainer(tmp_path / "killed", dataset, None, first, KillAt(7)).fit(Start(None))
    with open_output_folder(tmp_path / "killed", resume_from_checkpoint=True, overwrite_output_dir=False) as start:
        assert start.checkpoint == tmp_path / "killed" / "checkpoint-5"
        resumed = make_trainer(tmp_path / "killed", dataset, start.checkpoint, second)
        assert resumed.plan.epoch_of(5) % 1 != 0
        resumed.fit(start)
    assert first.steps[:5] + second.steps == whole.steps
    assert second.evaluations == [record for record in whole.evaluations if record["step"] > 5]
    weights = {name: value.numpy() for name, value in resumed.parameters.items()}
    for name, value in uninterrupted.parameters.items():
        np.testing.assert_array_equal(weights[name], value.numpy(), err_msg=name)


def test_dropout_draws_differ_between_steps_and_micro_batches(dataset: Dataset) -> None:
    model = build_model(tiny_config(), None, seed=3, hidden_dropout=0.5)
    batch = make_plan(dataset, packing=True, batch_size=2, accumulation=1).micro_batches(0)[0]

    def loss(step: int, micro_batch: int, scale: float = 1.0) -> float:
        model.randomness.set(step=step, micro_batch=micro_batch, dropout_scale=scale)
        return float(supervised().loss(model, batch).loss_sum)

    model.train()
    assert loss(0, 0) == loss(0, 0)
    assert len({loss(0, 0), loss(0, 1), loss(1, 0), loss(0, 0, 0.0)}) == 4

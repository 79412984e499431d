"""One optimizer step: the same update however its samples are laid out, and nothing updated by what is not finite."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from erniekit.config.sections.training import TrainingParameters
from erniekit.model import bf16
from erniekit.model.cpu_gradients import linear
from erniekit.training.collectives import forward_backward_no_pipelining
from erniekit.training.gradients import global_norm
from erniekit.training.objectives.objective import MicroBatchLoss, Objective
from erniekit.training.optim.adamw import build_optimizer
from erniekit.training.step import NotFiniteError, StepResult, train_step

from .fakes import FAKE_OBJECTIVE, PADDING, FakeBatch, FakeLoss, FakeModel, FakePlan, _cross_entropy

SAMPLES = np.array([0, 3, 5, 8])


def packed(plan: FakePlan) -> list[FakeBatch]:
    """The four samples one after the other in one row. (The fake model looks at one token at a time.)"""
    parts = [plan.batch(SAMPLES[i : i + 1]) for i in range(4)]
    ids, labels = (np.concatenate([getattr(p, field) for p in parts], axis=1) for field in ("input_ids", "labels"))
    return [FakeBatch(ids, labels, ((0, 3, 5, 8),))]


LAYOUTS = {
    "(4, 1)": lambda plan: [plan.batch(SAMPLES)],
    "(2, 2)": lambda plan: [plan.batch(SAMPLES[:2]), plan.batch(SAMPLES[2:])],
    "(1, 4)": lambda plan: [plan.batch(SAMPLES[i : i + 1]) for i in range(4)],
    "uneven": lambda plan: [plan.batch(SAMPLES[:3]), plan.batch(SAMPLES[3:])],
    "packed": packed,
}


def one_step(batches: list[FakeBatch], **options: object) -> tuple[StepResult, dict[str, np.ndarray]]:
    model = FakeModel()
    optimizer = build_optimizer(model.named, TrainingParameters(weight_decay=0.1))
    arguments = {"step": 0, "learning_rate": 0.01, "max_grad_norm": 0.5} | options
    result = train_step(model, list(model.named.values()), optimizer, FAKE_OBJECTIVE, batches, **arguments)
    return result, model.arrays()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_update(layout: str) -> None:
    plan = FakePlan()
    expected, parameters = one_step(LAYOUTS["(4, 1)"](plan))
    result, own = one_step(LAYOUTS[layout](plan))
    assert result.totals.units == sum(plan.batch(SAMPLES[i : i + 1]).target_count for i in range(4))
    assert result.totals.loss == pytest.approx(expected.totals.loss, rel=1e-6)
    assert result.totals.metrics == pytest.approx(expected.totals.metrics)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    for name, value in parameters.items():
        np.testing.assert_allclose(own[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_loss_is_the_mean_over_target_tokens() -> None:
    plan, model = FakePlan(), FakeModel()
    batch = plan.batch(SAMPLES)
    logits = model(paddle.to_tensor(batch.input_ids)).numpy().astype(np.float64)
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows, columns = np.nonzero(batch.labels != PADDING)
    expected = -log_probabilities[rows, columns, batch.labels[rows, columns]].mean()
    result, _ = one_step([batch])
    assert result.totals.loss == pytest.approx(expected, rel=1e-5)


class FakeRanks:
    """A rank whose step has `units` on all ranks together; gradients and figures stay its own."""

    is_main_process = True
    forward_backward = staticmethod(forward_backward_no_pipelining)

    def __init__(self, units: float) -> None:
        self._units: float | None = units  # what is summed first

    def sum(self, values: np.ndarray) -> np.ndarray:
        units, self._units = self._units, None
        return values if units is None else np.array([units, *values[1:]])

    def reduce_gradients(self, parameters: list[paddle.Tensor]) -> list[paddle.Tensor]:
        return parameters

    def global_norm(self, parameters: list[paddle.Tensor]) -> paddle.Tensor:
        return global_norm(parameters)

    def all_finite(self, parameters: list[paddle.Tensor]) -> bool:
        return bool(np.isfinite(global_norm(parameters).item()))

    def after_update(self) -> None: ...


def test_two_ranks_with_half_of_the_samples_each() -> None:
    """Each rank divides by the targets of both, and the ranks' gradients add up to those of one process."""
    plan = FakePlan()
    halves = [[plan.batch(SAMPLES[:1])], [plan.batch(SAMPLES[1:])]]
    counts = np.array([float(sum(batch.target_count for batch in half)) for half in halves])

    def gradients(batches: list[FakeBatch], total: float) -> dict[str, np.ndarray]:
        model = FakeModel()
        seen: dict[str, np.ndarray] = {}

        class RecordingOptimizer:
            """An optimizer that only looks at the gradients."""

            def set_lr(self, _rate: float) -> None: ...

            def step(self) -> None:
                seen.update({name: tensor.grad.numpy().copy() for name, tensor in model.named.items()})

            def clear_grad(self, set_to_zero: bool) -> None: ...

        train_step(
            model,
            list(model.named.values()),
            RecordingOptimizer(),
            FAKE_OBJECTIVE,
            batches,
            step=0,
            learning_rate=0.1,
            ranks=FakeRanks(total),
        )
        return seen

    whole = gradients([plan.batch(SAMPLES)], counts.sum())
    ranks = [gradients(half, counts.sum()) for half in halves]
    for name, gradient in whole.items():
        np.testing.assert_allclose(ranks[0][name] + ranks[1][name], gradient, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("release", [False, True])
def test_releasing_gradients_changes_memory_only(release: bool) -> None:
    model, plan = FakeModel(), FakePlan()
    parameters = list(model.named.values())
    optimizer = build_optimizer(model.named, TrainingParameters(weight_decay=0.1))
    for step in range(3):
        train_step(
            model,
            parameters,
            optimizer,
            FAKE_OBJECTIVE,
            plan.micro_batches(step),
            step=step,
            learning_rate=0.01,
            release_grads=release,
        )
    assert all((parameter.grad is None) == release for parameter in parameters)
    reference = FakeModel()
    other = build_optimizer(reference.named, TrainingParameters(weight_decay=0.1))
    for step in range(3):
        train_step(
            reference,
            list(reference.named.values()),
            other,
            FAKE_OBJECTIVE,
            plan.micro_batches(step),
            step=step,
            learning_rate=0.01,
        )
    for name, value in reference.arrays().items():
        np.testing.assert_array_equal(model.arrays()[name], value, err_msg=name)


def test_a_step_without_targets_updates_nothing() -> None:
    batch = FakePlan().batch(SAMPLES)
    empty = FakeBatch(batch.input_ids, np.full_like(batch.labels, PADDING), batch.samples)
    result, parameters = one_step([empty, empty])
    assert not result.updated
    assert result.totals.units == 0
    for name, value in FakeModel().arrays().items():
        np.testing.assert_array_equal(parameters[name], value, err_msg=name)


def poisoned(where: str, culprit: int) -> Objective:
    """An objective whose loss, or only its gradient, is not finite for the batch that holds the sample `culprit`."""

    def loss(model: FakeModel, batch: FakeBatch) -> MicroBatchLoss:
        part = FAKE_OBJECTIVE.loss(model, batch)
        if all(culprit not in row for row in batch.samples):
            return part
        weight = model.named["model.norm.weight"]
        # sqrt has an infinite slope at zero: the value stays finite, its gradient does not.
        bad = weight.sum() * float("nan") if where == "loss" else (weight - weight.detach()).sum().sqrt()
        return MicroBatchLoss(part.loss_sum + bad, part.metric_sums)

    return Objective(FakeLoss(loss), "target tokens")


@pytest.mark.parametrize(("where", "what"), [("loss", "the loss"), ("gradient", "the gradient norm")])
def test_not_finite_names_the_micro_batch_and_updates_nothing(where: str, what: str) -> None:
    model, plan = FakeModel(), FakePlan()
    optimizer = build_optimizer(model.named, TrainingParameters())
    with pytest.raises(NotFiniteError) as caught:
        train_step(
            model,
            list(model.named.values()),
            optimizer,
            poisoned(where, culprit=5),
            LAYOUTS["(1, 4)"](plan),
            step=3,
            learning_rate=0.01,
        )
    assert caught.value.what == what
    assert caught.value.micro_batches == (2,)
    for name, value in FakeModel().arrays().items():
        np.testing.assert_array_equal(model.arrays()[name], value, err_msg=name)


class RoundingModel(FakeModel):
    """The fake model with its linear layers in bfloat16."""

    def forward(self, input_ids: paddle.Tensor) -> paddle.Tensor:
        with bf16.products():
            hidden = F.embedding(input_ids, self.named["model.embed_tokens.weight"])
            hidden = F.silu(linear(hidden, self.named["model.layers.0.mlp.weight"], None))
            return linear(hidden, self.named["lm_head.weight"], None)


@pytest.mark.skipif(not bf16.is_available()[0], reason=bf16.is_available()[1])
def test_a_step_rounds_each_weight_once_and_the_next_one_sees_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, model = FakePlan(), RoundingModel()
    parameters = [model.named[name] for name in model.named if "norm" not in name and "bias" not in name]
    optimizer = build_optimizer(model.named, TrainingParameters())
    rounded = []
    original = bf16._rounded
    monkeypatch.setattr(bf16, "_rounded", lambda x: rounded.append(id(x)) or original(x))
    for step in range(3):
        rounded.clear()
        batches = LAYOUTS["(1, 4)"](plan)
        with paddle.no_grad():
            expected = sum(float(_cross_entropy(model, batch).loss_sum) for batch in batches)
        assert [rounded.count(id(weight)) for weight in parameters] == [0, 4, 4]
        rounded.clear()
        result = train_step(model, parameters, optimizer, FAKE_OBJECTIVE, batches, step=step, learning_rate=0.1)
        assert [rounded.count(id(weight)) for weight in parameters] == [0, 1, 1]
        assert result.totals.loss_sum == expected

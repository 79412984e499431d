"""The objectives of models that speak: sums over counts of levels and parts, whatever the layout of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from erniekit.config.sections.training import TrainingParameters
from erniekit.data.batch import Batch, CodePart
from erniekit.data.templates.ernie import IGNORE_INDEX, Sample
from erniekit.model.builder import build_model
from erniekit.model.code_layers import code_logits
from erniekit.model.decoder import Decoder
from erniekit.model.weights import named_weights
from erniekit.training.objectives.codes import ar_nar_codes, masked_codes
from erniekit.training.objectives.forward import batch_context, embedding_inputs
from erniekit.training.objectives.objective import Objective
from erniekit.training.optim.adamw import build_optimizer
from erniekit.training.step import StepResult, train_step
from tests.model.tiny_speech import LEVELS
from tests.training.code_batches import batch_of, documents, speaking_config
from tests.training.fakes import RecordingRanks

WEIGHTS = (8.0, 4.0, 2.0, 1.0)
FACTORS = (0.3, 0.5, 2.0)  # of text, prompt, response


def objective_of(name: str, **options: Any) -> Objective:
    return masked_codes(WEIGHTS, **options) if name == "masked" else ar_nar_codes(WEIGHTS, FACTORS, **options)


def layouts(name: str, samples: Sequence[Sample]) -> dict[str, list[Batch]]:
    """The same documents as one packed row, padded rows, one micro-batch each, and two of different sizes."""
    alone = [[sample] for sample in samples]
    return {
        "packed": [batch_of(name, [samples])],
        "padded": [batch_of(name, alone)],
        "single": [batch_of(name, [row]) for row in alone],
        "uneven": [batch_of(name, [samples[:1]]), batch_of(name, [samples[3:], samples[1:3]])],
        "with an empty one": [batch_of(name, [samples]), batch_of(name, [[]])],
    }


def loss_and_gradients(name: str, batches: Sequence[Batch], **options: Any) -> tuple[float, dict[str, np.ndarray]]:
    model, objective = build_model(speaking_config(name), None, seed=5), objective_of(name, **options)
    loss, units = objective.loss_for(model, batches), sum(objective.units(batch) for batch in batches)
    total = 0.0
    for batch in batches:
        part = loss(model, batch).loss_sum / units
        part.backward()
        total += float(part)
    return total, {
        name: weight.grad.numpy() for name, weight in named_weights(model).items() if weight.grad is not None
    }


@pytest.mark.parametrize("name", ["masked", "ar_nar"])
def test_the_layout_of_a_step_changes_nothing(name: str) -> None:
    ways = layouts(name, documents(name, 3, 6))
    loss, gradients = loss_and_gradients(name, ways.pop("packed"))
    assert gradients and loss > 0
    for way, batches in ways.items():
        found, of = loss_and_gradients(name, batches)
        assert found == pytest.approx(loss, rel=1e-6), way
        for weight, gradient in gradients.items():
            worst = np.abs(of[weight] - gradient).max()
            assert worst <= 1e-6 * max(1.0, np.abs(gradient).max()), (way, weight, worst)


@pytest.mark.parametrize("name", ["masked", "ar_nar"])
@pytest.mark.parametrize("options", [{"fused_head": True}, {"dense_mask": True}], ids=str)
def test_ways_to_compute_it_are_the_same(name: str, options: dict[str, bool]) -> None:
    batches = layouts(name, documents(name, 4, 6))["uneven"]
    loss, gradients = loss_and_gradients(name, batches)
    found, of = loss_and_gradients(name, batches, **options)
    assert found == pytest.approx(loss, rel=1e-6)
    for weight, gradient in gradients.items():
        np.testing.assert_allclose(of[weight], gradient, atol=1e-5 * max(1, np.abs(gradient).max()), err_msg=weight)


def losses_of_levels(model: Decoder, batch: Batch) -> list[np.ndarray]:
    """-log p of each position's label, float64[B, S] for each level and for text; 0 where there is none."""
    with paddle.no_grad():
        context = batch_context(model, batch)
        hidden_BSH = model.norm(model.forward_layers(model.embed(embedding_inputs(model, batch)), context))
    targets = batch.codes_view
    assert targets is not None
    labels = [*np.moveaxis(targets.labels, -1, 0), batch.labels]
    found = []
    for level, labels_BS in enumerate(labels):
        losses = np.zeros(batch.shape)
        at = np.nonzero(labels_BS != IGNORE_INDEX)
        if len(at[0]):
            rows = paddle.to_tensor(hidden_BSH.numpy()[at])
            logits = code_logits(model, rows, level).numpy().astype(np.float64)
            log_sums = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
            losses[at] = log_sums - logits[np.arange(len(logits)), labels_BS[at]]
        found.append(losses)
    return found


def step_on(name: str, batches: Sequence[Batch], objective: Objective | None = None) -> tuple[StepResult, Decoder]:
    model = build_model(speaking_config(name), None, seed=5)
    weights = dict(named_weights(model))
    optimizer = build_optimizer(weights, TrainingParameters())
    objective = objective or objective_of(name)
    return train_step(
        model, list(weights.values()), optimizer, objective, batches, step=0, learning_rate=0.0
    ), model  # fmt: skip


def test_masked_codes_are_means_of_levels() -> None:
    (batch,) = layouts("masked", documents("masked", 5, 4))["packed"]
    result, model = step_on("masked", [batch])
    targets = batch.codes_view
    assert targets is not None
    means = [
        losses.sum() / count
        for losses, count in zip(losses_of_levels(model, batch)[:LEVELS], targets.counts, strict=True)
    ]
    assert result.totals.loss == pytest.approx(np.dot(np.array(WEIGHTS) / sum(WEIGHTS), means), rel=1e-5)
    metrics = result.totals.metrics
    assert [metrics[f"loss_{level}"] for level in range(LEVELS)] == pytest.approx(means, rel=1e-5)
    assert metrics["code_accuracy"] == pytest.approx(
        np.dot([metrics[f"accuracy_{level}"] for level in range(LEVELS)], targets.counts) / targets.counts.sum()
    )
    assert set(metrics) == {
        "code_accuracy",
        *(f"{of}_{level}" for of in ("loss", "accuracy") for level in range(LEVELS)),
    }


def test_parts_of_ar_and_nar_have_means_of_their_own() -> None:
    (batch,) = layouts("ar_nar", documents("ar_nar", 5, 6))["padded"]
    result, model = step_on("ar_nar", [batch])
    targets = batch.codes_view
    assert targets is not None and targets.part is not None
    *levels, words = losses_of_levels(model, batch)

    def count(part: CodePart) -> int:
        own = targets.part == part
        return int(np.count_nonzero(targets.labels[own] != IGNORE_INDEX) + (batch.labels[own] != IGNORE_INDEX).sum())

    def total(losses: np.ndarray, part: CodePart) -> float:
        return float(losses[targets.part == part].sum())

    response = sum(w * total(losses, CodePart.RESPONSE) for w, losses in zip(WEIGHTS, levels, strict=True))
    expected = (
        FACTORS[0] * total(words, CodePart.TEXT) / count(CodePart.TEXT)
        + FACTORS[1] * total(levels[0], CodePart.PROMPT) / count(CodePart.PROMPT)
        + FACTORS[2] * response / count(CodePart.RESPONSE)
        + total(words, CodePart.TRANSCRIPT) / count(CodePart.TRANSCRIPT)
    )
    assert result.totals.loss == pytest.approx(expected, rel=1e-5)
    assert 0 <= result.totals.metrics["text_accuracy"] <= 1


def test_only_what_has_a_factor_is_trained() -> None:
    """Without factors of text and prompt their labels are as good as absent, apart from what a loss is divided by."""
    batch = batch_of("ar_nar", [documents("ar_nar", 6, 4)])
    targets = batch.codes_view
    assert targets is not None and targets.part is not None
    others = np.isin(targets.part, (CodePart.TEXT, CodePart.PROMPT))
    bare = batch.with_arrays(
        labels=np.where(others, IGNORE_INDEX, batch.labels),
        code_labels=np.where(others[..., None], IGNORE_INDEX, targets.labels),
    )
    objective = ar_nar_codes(WEIGHTS, (0.0, 0.0, 1.0))
    found, expected = (step_on("ar_nar", [each], objective)[0] for each in (batch, bare))
    assert found.totals.loss == pytest.approx(expected.totals.loss, rel=1e-6)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)


def test_a_level_without_codes_has_no_mean_and_ends_no_step() -> None:
    sample = documents("ar_nar", 7, 1)  # of level 0
    result, _ = step_on("ar_nar", [batch_of("ar_nar", [sample])])
    assert {"loss_0", "accuracy_0", "code_accuracy"} < result.totals.metrics.keys()
    assert not {"loss_1", "accuracy_2"} & result.totals.metrics.keys()
    assert np.isfinite(result.totals.loss) and result.updated


def test_one_sum_over_ranks_tells_the_counts_of_a_step() -> None:
    """A step whose other ranks have other levels divides by the labels of all."""
    batches = layouts("masked", documents("masked", 8, 2))["single"]
    model = build_model(speaking_config("masked"), None, seed=5)
    ranks = RecordingRanks()
    objective_of("masked").loss_for(model, batches, ranks)
    (sums,) = ranks.asked
    expected = sum(batch.codes_view.counts for batch in batches)
    np.testing.assert_array_equal(sums, [*expected, expected.sum()])

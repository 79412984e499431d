"""Evaluation: token-weighted means over batches of unequal size, and training left as it was."""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest

from erniekit.errors import TrainingError
from erniekit.training.evaluation import evaluate
from erniekit.training.objectives.objective import MicroBatchLoss, Objective

from .fakes import FAKE_OBJECTIVE, PADDING, FakeBatch, FakeLoss, FakeModel, FakePlan, RecordingRanks, ReplayedRanks


def evaluation_plan(samples: int = 6) -> FakePlan:
    return FakePlan(samples, batch_size=1, accumulation=1)


def expected(model: FakeModel, plan: FakePlan, batches: int) -> tuple[float, float, int]:
    """Loss and accuracy over all target tokens, one token at a time in float64."""
    losses, hits = [], []
    for step in range(batches):
        (batch,) = plan.micro_batches(step)
        logits = model(paddle.to_tensor(batch.input_ids)).numpy().astype(np.float64)
        for row, column in zip(*np.nonzero(batch.labels != PADDING), strict=True):
            scores, label = logits[row, column], batch.labels[row, column]
            losses.append(np.log(np.exp(scores).sum()) - scores[label])
            hits.append(scores.argmax() == label)
    return float(np.mean(losses)), float(np.mean(hits)), len(losses)


@pytest.mark.parametrize(("limit", "run"), [(0, 6), (-1, 6), (2, 2), (6, 6), (99, 6)])
def test_means_are_over_target_tokens(limit: int, run: int) -> None:
    model, plan = FakeModel(), evaluation_plan()
    loss, accuracy, targets = expected(model, plan, run)
    result = evaluate(model, plan, FAKE_OBJECTIVE, max_batches=limit)
    assert (result.batches, result.batches_available, result.units) == (run, 6, targets)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(loss), rel=1e-5)
    assert result.metrics["token_accuracy"] == pytest.approx(accuracy)
    assert result.record().keys() >= {"eval_loss", "eval_perplexity", "eval_token_accuracy", "eval_batches"}


def test_batch_size_changes_nothing() -> None:
    model = FakeModel()
    plan = FakePlan(6, batch_size=3, accumulation=1)
    plan.seed = evaluation_plan().seed
    one_by_one, in_threes = (evaluate(model, p, FAKE_OBJECTIVE) for p in (evaluation_plan(), plan))
    assert in_threes.batches == 2
    assert in_threes.loss == pytest.approx(one_by_one.loss, rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_no_dropout_no_gradients_and_the_mode_is_put_back(training: bool) -> None:
    model = FakeModel(dropout=0.9)
    model.train() if training else model.eval()
    position = (model.randomness.step, model.randomness.micro_batch)
    assert (
        evaluate(model, evaluation_plan(), FAKE_OBJECTIVE).loss
        == evaluate(FakeModel(), evaluation_plan(), FAKE_OBJECTIVE).loss
    )
    assert model.training is training
    assert (model.randomness.step, model.randomness.micro_batch) == position
    assert all(parameter.grad is None for parameter in model.named.values())


def test_perplexity_too_large_for_a_float() -> None:
    huge = Objective(
        FakeLoss(lambda model, batch: MicroBatchLoss(paddle.to_tensor(1e4) * batch.target_count, {})),
        "",
        True,
    )
    assert evaluate(FakeModel(), evaluation_plan(), huge).perplexity == math.inf


def test_an_objective_without_perplexity_reports_none() -> None:
    plain = Objective(FAKE_OBJECTIVE.loss, "pairs")
    result = evaluate(FakeModel(), evaluation_plan(), plain)
    assert result.perplexity is None
    assert "eval_perplexity" not in result.record()


def test_a_loss_that_is_not_finite_names_the_samples() -> None:
    broken = Objective(FakeLoss(lambda model, batch: MicroBatchLoss(paddle.to_tensor(float("nan")), {})), "")
    plan = evaluation_plan()
    ((sample,),) = plan.micro_batches(0)[0].samples
    model = FakeModel()
    with pytest.raises(TrainingError, match=rf"not finite in batch 0, samples eval.jsonl:{sample + 1}$"):
        evaluate(model, plan, broken, describe_sample=lambda index: f"eval.jsonl:{index + 1}")


def plan_of_rank(world: int, rank: int, samples: int = 6) -> FakePlan:
    plan = evaluation_plan(samples)
    plan.dp_rank, plan.dp_world_size = rank, world
    return plan


@pytest.mark.parametrize(("world", "limit"), [(2, 0), (3, 5), (4, 0), (4, 2), (7, 6)])
def test_ranks_that_divide_the_batches_have_the_result_of_one(world: int, limit: int) -> None:
    """Every rank takes as many turns; what it sums is recorded first, then each has the sums over all."""
    alone = evaluate(FakeModel(), evaluation_plan(), FAKE_OBJECTIVE, max_batches=limit)
    plans = [plan_of_rank(world, rank) for rank in range(world)]
    recordings = [RecordingRanks() for _ in plans]
    for plan, ranks in zip(plans, recordings, strict=True):
        evaluate(FakeModel(), plan, FAKE_OBJECTIVE, max_batches=limit, ranks=ranks)
    asked = [ranks.asked for ranks in recordings]
    for plan in plans:
        result = evaluate(FakeModel(), plan, FAKE_OBJECTIVE, max_batches=limit, ranks=ReplayedRanks(*asked))
        assert result.loss == pytest.approx(alone.loss, rel=1e-12)
        assert result.metrics == pytest.approx(alone.metrics, rel=1e-12)
        same = ("units", "tokens", "batches", "batches_available")
        assert {name: getattr(result, name) for name in same} == {name: getattr(alone, name) for name in same}


def test_a_loss_that_is_not_finite_on_one_rank_is_told_by_all() -> None:
    """Rank 1 meets it in its second batch, goes on with the others, and all name the same batch."""
    plans = [plan_of_rank(2, rank) for rank in range(2)]
    (bad,) = plans[1].micro_batches(3)
    loss = FAKE_OBJECTIVE.loss

    def broken(model: FakeModel, batch: FakeBatch) -> MicroBatchLoss:
        result = loss(model, batch)
        return (
            MicroBatchLoss(result.loss_sum * math.nan, result.metric_sums) if batch.samples == bad.samples else result
        )

    objective = Objective(FakeLoss(broken), "")
    recordings = [RecordingRanks(), RecordingRanks()]
    evaluate(FakeModel(), plans[0], objective, ranks=recordings[0])
    with pytest.raises(TrainingError):
        evaluate(FakeModel(), plans[1], objective, ranks=recordings[1])
    assert len(recordings[1].asked) == len(recordings[0].asked)
    for plan in plans:
        with pytest.raises(TrainingError, match=r"not finite in batch 3, samples \d+$"):
            evaluate(FakeModel(), plan, objective, ranks=ReplayedRanks(*(ranks.asked for ranks in recordings)))

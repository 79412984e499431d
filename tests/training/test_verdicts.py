"""KTO's loss by hand in float64, its divergence of the whole step, and what packing must not change."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from erniekit.config.sections.kto import KtoParameters
from erniekit.data.collate import collate
from erniekit.data.pairs import EncodedAnswer, join_pair
from erniekit.model.weights import named_weights
from erniekit.training.evaluation import evaluate
from erniekit.training.objectives.preference import answer_log_probabilities, reference_logps_function
from erniekit.training.objectives.reference import FrozenReference
from erniekit.training.objectives.verdicts import kto_losses, shares_below, verdicts
from erniekit.training.step import train_step

from ..model.tiny import tiny_model
from .test_preference import LAYOUTS, TOKENS, Plan

VERDICTS = (1.0, -1.0, -1.0, 1.0)
SAMPLES = [
    join_pair(prompt, EncodedAnswer(own, own), EncodedAnswer(other, other), verdict)
    for (prompt, own, other), verdict in zip(TOKENS, VERDICTS, strict=True)
]
BETA = 0.3
PLAIN = KtoParameters()


def batches(layout):
    return [collate([[SAMPLES[i] for i in row] for row in rows], rows, 0, pairs=True) for rows in LAYOUTS[layout]]


def objective(decoder, settings=PLAIN, seed=5):
    measure = reference_logps_function(answer_log_probabilities())
    return verdicts(settings, BETA, FrozenReference(tiny_model(seed=seed), decoder, measure, updated=False))


def log_ratios():
    """r of the answers and of the answers to other prompts, float64[4, 2], of the two models of these tests."""
    measured = []
    for seed in ({}, {"seed": 5}):
        answers = answer_log_probabilities()(tiny_model(**seed), batches("one row")[0])
        measured.append(np.stack([answers.chosen.numpy(), answers.rejected.numpy()], 1).astype(np.float64))
    return measured[0] - measured[1]


def by_hand(ratios, desirable, divergence, beta, weights):
    def s(value):
        return 1 / (1 + np.exp(-value))

    good = weights[0] * (1 - s(beta * (ratios - divergence)))
    bad = weights[1] * (1 - s(beta * (divergence - ratios)))
    return np.where(desirable, good, bad)


def test_losses_and_gradients_are_those_of_the_paper():
    rng = np.random.default_rng(1)
    ratios, desirable = rng.normal(0, 4, 50), rng.random(50) < 0.5
    given = paddle.to_tensor(ratios.astype(np.float32))
    given.stop_gradient = False
    weights = (1.5, 0.7)
    losses = kto_losses(given, paddle.to_tensor(desirable.astype(np.float32)), 0.8, 0.25, weights)
    np.testing.assert_allclose(losses.numpy(), by_hand(ratios, desirable, 0.8, 0.25, weights), rtol=1e-6)
    losses.sum().backward()
    step = 1e-5
    slopes = by_hand(ratios + step, desirable, 0.8, 0.25, weights) - by_hand(
        ratios - step, desirable, 0.8, 0.25, weights
    )
    np.testing.assert_allclose(given.grad.numpy(), slopes / (2 * step), rtol=1e-5, atol=1e-8)


def test_the_loss_and_the_divergence_of_a_step():
    decoder, ratios = tiny_model(), log_ratios()
    settings = KtoParameters(desirable_weight=2.0, undesirable_weight=0.5)
    loss = objective(decoder, settings).loss_for(decoder, batches("one row"))
    found = loss(decoder, batches("one row")[0])
    mean = ratios[:, 1].mean()
    expected = by_hand(ratios[:, 0], np.array(VERDICTS) > 0, max(0, mean), BETA, (2.0, 0.5))
    assert float(found.loss_sum) == pytest.approx(expected.sum(), rel=1e-5)
    assert float(found.metric_sums["kl"]) == pytest.approx(4 * mean, rel=1e-5)
    assert float(found.metric_sums["reward_desirable"]) == pytest.approx(BETA * ratios[[0, 3], 0].sum(), rel=1e-5)
    assert float(found.metric_sums["reward_undesirable"]) == pytest.approx(BETA * ratios[[1, 2], 0].sum(), rel=1e-5)
    assert "reward_auc" not in found.metric_sums  # a step of training is no measure


def gradient(loss, decoder, some):
    decoder.clear_gradients()
    sum(loss(decoder, batch).loss_sum for batch in some).backward()
    return {name: weight.grad.numpy().copy() for name, weight in named_weights(decoder).items()}


def test_a_divergence_above_zero_is_that_of_the_step_and_a_constant():
    """Answers to other prompts get likelier by a made-up reference, one of which alone would give another loss."""
    decoder = tiny_model()

    def reference(some):
        found = reference_logps_function(answer_log_probabilities())(tiny_model(seed=5), some)
        return [(own, other - 3.0 * (1 + number)) for number, (own, other) in enumerate(found)]

    goal = verdicts(KtoParameters(), BETA, reference)
    parts = batches("four micro-batches")
    whole = float(sum(goal.loss_for(decoder, parts)(decoder, part).loss_sum for part in parts))
    alone = float(sum(goal.loss_for(decoder, [part])(decoder, part).loss_sum for part in parts))
    assert abs(whole - alone) > 1e-3 and decoder.training
    mean = log_ratios()[:, 1].mean() + 3.0  # each batch is given to the reference on its own
    assert mean > 0.5
    expected = by_hand(log_ratios()[:, 0], np.array(VERDICTS) > 0, mean, BETA, (1.0, 1.0))
    assert whole == pytest.approx(expected.sum(), rel=1e-5)


def test_the_pass_with_gradients_reads_no_answers_to_other_prompts():
    """The same loss and gradients as of whole batches, from batches that are shorter; the reference is asked once."""
    decoder, parts, asked = tiny_model(), batches("mixed"), []

    def reference(some):
        asked.append(len(some))
        return reference_logps_function(answer_log_probabilities())(tiny_model(seed=5), some)

    goal = verdicts(KtoParameters(), BETA, reference, multiple_of=4)
    loss = goal.loss_for(decoder, parts)
    shorter = [goal.part_for_loss(part) for part in parts]
    found = gradient(loss, decoder, shorter)
    assert asked == [1] * len(parts)
    for name, value in gradient(loss, decoder, parts).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    for short, whole in zip(shorter, parts, strict=True):
        assert short.shape[1] % 4 == 0 and short.token_count < whole.token_count
        assert short.samples == whole.samples and goal.units(short) == goal.units(whole)


def step_of(layout):
    decoder = tiny_model()
    decoder.train()
    parameters = list(named_weights(decoder).values())
    optimizer = paddle.optimizer.SGD(1.0, parameters=parameters)
    before = {key: weight.numpy() for key, weight in named_weights(decoder).items()}
    goal = objective(decoder, KtoParameters(undesirable_weight=2.0))
    result = train_step(decoder, parameters, optimizer, goal, batches(layout), step=0, learning_rate=1.0)
    return {key: before[key] - weight.numpy() for key, weight in named_weights(decoder).items()}, result


def test_accumulation_and_packing_change_nothing():
    expected, first = step_of("one row")
    assert first.totals.units == 4 and max(np.abs(value).max() for value in expected.values()) > 1e-4
    for layout in list(LAYOUTS)[1:]:
        found, result = step_of(layout)
        assert result.totals.loss == pytest.approx(first.totals.loss, rel=2e-6), layout
        assert result.totals.metrics == pytest.approx(first.totals.metrics, rel=1e-5, abs=1e-6), layout
        for key, value in found.items():
            scale = np.abs(expected[key]).max()
            np.testing.assert_allclose(value, expected[key], atol=1e-4 * scale, err_msg=f"{layout} {key}")


def test_the_area_under_the_curve_counts_pairs():
    rng = np.random.default_rng(2)
    good, bad = rng.integers(0, 9, 40).astype(float), rng.integers(0, 7, 30).astype(float)
    pairs = (good[:, None] > bad) + 0.5 * (good[:, None] == bad)
    assert shares_below(good, np.sort(bad)).mean() == pytest.approx(pairs.mean(), rel=1e-12)


class VerdictPlan(Plan):
    def __init__(self, layout):
        self.batches = batches(layout)


def test_an_evaluation_has_the_area_over_all_batches():
    ratios = log_ratios()[:, 0]
    good, bad = ratios[[0, 3]], ratios[[1, 2]]
    expected = ((good[:, None] > bad) + 0.5 * (good[:, None] == bad)).mean()
    for layout in LAYOUTS:
        decoder = tiny_model()
        result = evaluate(decoder, VerdictPlan(layout), objective(decoder))
        assert result.metrics["reward_auc"] == pytest.approx(expected), layout
        assert result.units == 4 and result.perplexity is None

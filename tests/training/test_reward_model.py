"""Scores of answers: the loss by hand in float64, what packing must not change, margins, centring, rankings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import paddle
import pytest

from erniekit.config.sections.reward_model import RewardModelParameters
from erniekit.data.collate import collate
from erniekit.data.pairs import EncodedAnswer, join_scored
from erniekit.data.templates.ernie import IGNORE_INDEX, Sample
from erniekit.model.builder import build_model
from erniekit.model.weights import named_weights
from erniekit.training.evaluation import evaluate
from erniekit.training.objectives.reward_model import answer_scores, reward_losses, reward_model, scores_at_labels
from erniekit.training.step import train_step

from ..model.tiny import tiny_model
from .test_preference import LAYOUTS, TOKENS, Plan

MARGINS = (1.0, float("nan"), 2.5, 0.5)
SAMPLES = [
    join_scored(prompt, EncodedAnswer(chosen, chosen), EncodedAnswer(rejected, rejected), margin)
    for (prompt, chosen, rejected), margin in zip(TOKENS, MARGINS, strict=True)
]
SETTINGS = RewardModelParameters(margin_scale=0.5, center_rewards_coefficient=0.1)


def scorer():
    """A tiny model that gives scores large enough to tell apart."""
    decoder = build_model(replace(tiny_model().config, scored=True), None, seed=3)
    decoder.head.weight.set_value(decoder.head.weight * 20)
    return decoder


def batches(layout):
    return [collate([[SAMPLES[i] for i in row] for row in rows], rows, 0, pairs=True) for rows in LAYOUTS[layout]]


def alone(decoder):
    """The score of each answer in a dialogue of its own: the last state times the weight, float64[4, 2]."""
    scores = []
    for prompt, *answers in TOKENS:
        for answer in answers:
            tokens = np.array(prompt + answer, np.int32)
            labels = np.full(len(tokens), IGNORE_INDEX, np.int32)
            labels[-1] = 0
            batch = collate([[Sample(tokens, labels)]], [[0]], 0)
            scores.append(float(scores_at_labels()(decoder, batch).values))
    return np.array(scores, np.float64).reshape(-1, 2)


def test_a_sample_holds_whole_answers_and_marks_their_last_tokens():
    sample = join_scored([1, 2, 3], EncodedAnswer([4, 5], [4, 5]), EncodedAnswer([6], [6]), 2.0)
    assert sample.input_ids.tolist() == [1, 2, 3, 4, 5, 3, 6]
    assert sample.labels.tolist() == [-100, -100, -100, -100, 5, -100, 6]
    assert sample.pair == (2, 5, 2.0)
    sample = join_scored([1, 2, 3], EncodedAnswer([4, 5], [4, 5]), EncodedAnswer([6], [6]), 2.0, window=6)
    assert sample.input_ids.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 6]
    assert sample.labels.tolist() == [-100, -100, -100, -100, 5, -100, -100, -100, 6]
    assert sample.pair == (2, 7, 2.0) and sample.documents == (5,)


def test_a_score_is_the_last_state_times_the_weight():
    decoder = scorer()
    assert named_weights(decoder)["score.weight"].shape == [1, decoder.config.hidden_size]
    assert not any("lm_head" in name for name in named_weights(decoder))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dense_mask", [False, True])
def test_packed_answers_have_the_scores_of_separate_dialogues(layout, dense_mask):
    decoder = scorer()
    expected = alone(decoder)
    for batch in batches(layout):
        found = answer_scores(dense_mask=dense_mask)(decoder, batch)
        order = [sample for row in batch.samples for sample in row]
        np.testing.assert_allclose(found.chosen.numpy(), expected[order, 0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.rejected.numpy(), expected[order, 1], rtol=1e-4, atol=1e-5)


def by_hand(scores, margins, centering):
    chosen, rejected = scores[:, 0], scores[:, 1]
    return np.log1p(np.exp(-(chosen - rejected - margins))) + centering * (chosen + rejected) ** 2


def test_losses_and_gradients_are_those_of_the_formula():
    rng = np.random.default_rng(0)
    scores, margins = rng.normal(0, 2, (30, 2)), rng.random(30)
    given = paddle.to_tensor(scores.astype(np.float32))
    given.stop_gradient = False
    losses = reward_losses(given[:, 0], given[:, 1], paddle.to_tensor(margins.astype(np.float32)), 0.2)
    np.testing.assert_allclose(losses.numpy(), by_hand(scores, margins, 0.2), rtol=1e-5)
    losses.sum().backward()
    for column in range(2):
        step = np.zeros(2)
        step[column] = 1e-5
        slopes = by_hand(scores + step, margins, 0.2) - by_hand(scores - step, margins, 0.2)
        np.testing.assert_allclose(given.grad.numpy()[:, column], slopes / 2e-5, rtol=1e-4, atol=1e-6)


@pytest.mark.proves("margin_scale", "center_rewards_coefficient")
def test_margins_and_centring_are_in_the_loss():
    decoder = scorer()
    scores = alone(decoder)
    margins = np.array([1.0, 0.0, 2.5, 0.5])
    for settings in (RewardModelParameters(), SETTINGS, replace(SETTINGS, margin_scale=0.0)):
        found = reward_model(settings).loss(decoder, batches("one row")[0])
        expected = by_hand(scores, settings.margin_scale * margins, settings.center_rewards_coefficient)
        assert float(found.loss_sum) == pytest.approx(expected.sum(), rel=1e-5)
    assert float(found.metric_sums["reward_accuracy"]) == (scores[:, 0] > scores[:, 1]).sum()
    assert float(found.metric_sums["reward_margin"]) == pytest.approx((scores[:, 0] - scores[:, 1]).sum(), rel=1e-4)


def step_of(layout):
    decoder = scorer()
    decoder.train()
    parameters = list(named_weights(decoder).values())
    optimizer = paddle.optimizer.SGD(1.0, parameters=parameters)
    before = {key: weight.numpy() for key, weight in named_weights(decoder).items()}
    result = train_step(
        decoder, parameters, optimizer, reward_model(SETTINGS), batches(layout), step=0, learning_rate=1.0
    )
    return {key: before[key] - weight.numpy() for key, weight in named_weights(decoder).items()}, result


def test_accumulation_and_packing_change_nothing():
    expected, first = step_of("one row")
    assert first.totals.units == 4 and all(np.abs(value).max() > 0 for value in expected.values())
    for layout in list(LAYOUTS)[1:]:
        found, result = step_of(layout)
        assert result.totals.loss == pytest.approx(first.totals.loss, rel=2e-6), layout
        assert result.totals.metrics == pytest.approx(first.totals.metrics, rel=1e-5, abs=1e-6), layout
        for key, value in found.items():
            scale = np.abs(expected[key]).max()
            np.testing.assert_allclose(value, expected[key], atol=1e-4 * scale, err_msg=f"{layout} {key}")


class ScoredPlan(Plan):
    def __init__(self, layout):
        self.batches = batches(layout)


def test_an_evaluation_has_accuracy():
    decoder = scorer()
    scores = alone(decoder)
    for layout in LAYOUTS:
        result = evaluate(decoder, ScoredPlan(layout), reward_model(SETTINGS))
        assert result.metrics["reward_accuracy"] == (scores[:, 0] > scores[:, 1]).mean() and result.perplexity is None

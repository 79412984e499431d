"""Losses of policy gradients by hand, in float64."""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest

from erniekit.training.objectives.policy_losses import (
    KL_ESTIMATORS,
    LOSSES,
    Clip,
    clipped_losses,
    per_answer,
    token_weights,
)

ANSWERS = np.array([0, 0, 1, 1, 1])
OLD = np.array([-1.0, -2.0, -0.5, -1.5, -1.0])
NEW = np.array([-0.6, -2.1, -0.9, -1.5, -0.7])
ADVANTAGES = np.array([1.0, 1.0, -2.0, -2.0, -2.0])


def tensor(values: np.ndarray, gradient: bool = False) -> paddle.Tensor:
    return paddle.to_tensor(values, stop_gradient=not gradient)


def by_hand(ratios: list[float], advantages: np.ndarray, low: float, high: float) -> list[float]:
    clipped = [min(max(ratio, 1 - low), 1 + high) for ratio in ratios]
    return [-min(ratio * a, within * a) for ratio, within, a in zip(ratios, clipped, advantages, strict=True)]


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.05, 0.5)])
def test_tokens_are_clipped_below_and_above(low: float, high: float) -> None:
    found = clipped_losses(*map(tensor, (NEW, OLD, ADVANTAGES, ANSWERS)), clip=Clip(low, high))
    ratios = [math.exp(new - old) for new, old in zip(NEW, OLD, strict=True)]
    np.testing.assert_allclose(found.losses.numpy(), by_hand(ratios, ADVANTAGES, low, high), rtol=1e-12)
    assert found.clipped_high.tolist() == [ratios[0] > 1 + high, False, False, False, False]
    assert found.clipped_low.tolist() == [False, False, ratios[2] < 1 - low, False, False]


def test_a_clipped_token_has_no_gradient() -> None:
    new = tensor(NEW, gradient=True)
    clipped_losses(new, *map(tensor, (OLD, ADVANTAGES, ANSWERS)), clip=Clip(0.2, 0.2)).losses.sum().backward()
    assert new.grad is not None
    expected = -np.exp(NEW - OLD) * ADVANTAGES
    expected[[0, 2]] = 0.0
    np.testing.assert_allclose(new.grad.numpy(), expected, rtol=1e-12)


def test_the_second_side_bounds_a_negative_advantage() -> None:
    values = [np.array([0.0]), np.array([-3.0]), np.array([-1.0]), np.array([0])]  # the ratio is e^3
    assert float(clipped_losses(*map(tensor, values), clip=Clip(0.2, 0.2)).losses) == pytest.approx(math.e**3)
    bounded = clipped_losses(*map(tensor, values), clip=Clip(0.2, 0.2, maximum=4.0))
    assert float(bounded.losses) == pytest.approx(4.0)


@pytest.mark.parametrize(("level", "exponents"), [("mean", [0.15, -0.1 / 3]), ("sum", [0.3, -0.1])])
def test_an_answer_has_one_ratio(level, exponents: list[float]) -> None:
    found = clipped_losses(*map(tensor, (NEW, OLD, ADVANTAGES, ANSWERS)), clip=Clip(10, 10), level=level)
    ratios = [math.exp(exponents[answer]) for answer in ANSWERS]
    np.testing.assert_allclose(found.losses.numpy(), -np.array(ratios) * ADVANTAGES, rtol=1e-12)
    np.testing.assert_allclose(found.log_ratio.numpy(), [exponents[answer] for answer in ANSWERS], rtol=1e-12)


def test_equal_weights_of_answers_tokens_and_lengths() -> None:
    answers = tensor(ANSWERS)
    assert token_weights(answers, "answer", 9, "float64").tolist() == pytest.approx([1 / 2] * 2 + [1 / 3] * 3)
    assert token_weights(answers, "token", 9, "float64").tolist() == [1.0] * 5
    assert token_weights(answers, "length", 8, "float64").tolist() == [1 / 8] * 5


def test_the_gradient_at_ratio_1_is_that_of_the_policy() -> None:
    """w = 1: the loss is -a and its gradient -a for every token; of an answer's ratio, spread over its tokens."""
    for level, expected in (("token", -ADVANTAGES), ("sum", -ADVANTAGES * [2, 2, 3, 3, 3]), ("mean", -ADVANTAGES)):
        new = tensor(OLD, gradient=True)
        found = clipped_losses(new, *map(tensor, (OLD, ADVANTAGES, ANSWERS)), clip=Clip(0.2, 0.2), level=level)
        found.losses.sum().backward()
        assert new.grad is not None
        np.testing.assert_allclose(found.losses.numpy(), -ADVANTAGES, rtol=1e-12)
        np.testing.assert_allclose(new.grad.numpy(), expected, rtol=1e-12)


def test_estimators_of_the_divergence() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    values = {name: estimate(*map(tensor, (np.log(p), np.log(q)))).numpy() for name, estimate in KL_ESTIMATORS.items()}
    np.testing.assert_allclose(values["k1"], np.log(p / q), rtol=1e-12)
    np.testing.assert_allclose(values["k2"], np.log(p / q) ** 2 / 2, rtol=1e-12)
    np.testing.assert_allclose(values["k3"], q / p - 1 - np.log(q / p), rtol=1e-12)
    divergence = (p * np.log(p / q)).sum()
    for name in ("k1", "k3"):  # the unbiased ones
        assert (p * values[name]).sum() == pytest.approx(divergence, rel=1e-12)


def test_no_tokens_are_no_answer() -> None:
    nothing = tensor(np.zeros(0))
    assert per_answer(nothing, tensor(np.zeros(0, np.int64)), mean=True).shape == [0]


def test_the_six_losses() -> None:
    assert set(LOSSES) == {"grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce++"}
    assert [name for name, loss in LOSSES.items() if loss.kl_in_reward] == ["rloo", "reinforce++"]
    assert {name: loss.level for name, loss in LOSSES.items() if loss.level != "token"} == {
        "gspo": "mean", "rloo": "sum"
    }  # fmt: skip

"""Every loss by hand, in float64, and its gradient by differences."""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.training.preference_losses import LOSSES, Context, PreferenceSettings, needs_reference

BETA, GAMMA, NOISE, LAMBDA = 0.3, 0.7, 0.1, 2.0
OFFSETS, KL = 0.4, (0.25, 0.75)  # of the chosen and the rejected answers


def s(x):
    return 1 / (1 + math.exp(-x))


def log_odds(mean):
    return mean - math.log(1 - math.exp(mean))


# the formulas of the papers, one pair at a time
BY_HAND = {
    "sigmoid": lambda w, r: (
        -(1 - NOISE) * math.log(s(BETA * (w - r - OFFSETS))) - NOISE * math.log(s(-BETA * (w - r - OFFSETS)))
    ),
    "robust": lambda w, r: (
        (-(1 - NOISE) * math.log(s(BETA * (w - r - OFFSETS))) + NOISE * math.log(s(-BETA * (w - r - OFFSETS))))
        / (1 - 2 * NOISE)
    ),
    "hinge": lambda w, r: max(0.0, 1 - BETA * (w - r)),
    "ipo": lambda w, r: (w - r - 1 / (2 * BETA)) ** 2,
    "kto_pair": lambda w, r: ((1 - s(BETA * (w - KL[1]))) + (1 - s(BETA * (KL[0] - r)))) / 2,
    "dpop": lambda w, r: -math.log(s(BETA * (w - r - LAMBDA * max(0.0, -w)))),
    "sppo_hard": lambda w, r: (w - 1 / (2 * BETA)) ** 2 + (r + 1 / (2 * BETA)) ** 2,
    "nca_pair": lambda w, r: -math.log(s(BETA * w)) - math.log(s(-BETA * w)) / 2 - math.log(s(-BETA * r)) / 2,
    "simpo": lambda w, r: (
        -(1 - NOISE) * math.log(s(BETA * (w - r) - GAMMA)) - NOISE * math.log(s(-BETA * (w - r) + GAMMA))
    ),
    "orpo": lambda w, r: -BETA * math.log(s(log_odds(w) - log_odds(r))),
}


def context(name, **changes):
    values = {"beta": BETA, "simpo_gamma": GAMMA, "label_smoothing": NOISE, "dpop_lambda": LAMBDA, **changes}
    return Context(PreferenceSettings(loss_type=name, **values), OFFSETS, *KL)


def values(name, chosen, rejected, **changes):
    tensors = [paddle.to_tensor(np.array(side, np.float32), stop_gradient=False) for side in (chosen, rejected)]
    losses = LOSSES[name].function(*tensors, context(name, **changes))
    losses.sum().backward()
    return losses.numpy(), tensors[0].grad.numpy(), tensors[1].grad.numpy()


# log-ratios on both sides of every kink; means of log-probabilities are below 0
RATIOS = [(0.0, 0.0), (1.5, -2.0), (-1.0, 0.5), (7.0, -6.0), (-3.0, -2.5), (0.3, 4.0)]
MEANS = [(-0.1, -2.0), (-1.0, -0.5), (-3.0, -3.0), (-0.01, -0.02)]


def test_every_loss_has_its_formula_here():
    assert set(BY_HAND) == set(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients(name):
    cases = MEANS if LOSSES[name].of_means else RATIOS
    formula = BY_HAND[name]
    losses, by_chosen, by_rejected = values(name, *zip(*cases, strict=True))
    step = 1e-6
    for number, (w, r) in enumerate(cases):
        assert losses[number] == pytest.approx(formula(w, r), rel=2e-5, abs=1e-6)
        if name == "dpop" and w == 0:
            continue  # its kink
        for got, wide in ((by_chosen, (step, 0)), (by_rejected, (0, step))):
            slope = (formula(w + wide[0], r + wide[1]) - formula(w - wide[0], r - wide[1])) / (2 * step)
            assert got[number] == pytest.approx(slope, rel=1e-4, abs=1e-5)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(LOSSES)), st.floats(-3, -0.05), st.floats(-3, -0.05), st.floats(0.05, 1))
def test_a_better_chosen_or_a_worse_rejected_answer_never_costs(name, chosen, rejected, more):
    if name in ("ipo", "sppo_hard", "nca_pair", "robust"):
        return  # they have a goal to come back to, or correct for labels that are wrong
    before, better, worse = (
        values(name, [w], [r], label_smoothing=0.0)[0][0]
        for w, r in ((chosen, rejected), (min(chosen + more, -1e-3), rejected), (chosen, rejected - more))
    )
    assert better <= before + 1e-5 and worse <= before + 1e-5


def test_goals_are_the_minima():
    assert values("ipo", [1 / (2 * BETA)], [0.0])[0][0] == pytest.approx(0)
    losses, by_chosen, by_rejected = values("sppo_hard", [1 / (2 * BETA)], [-1 / (2 * BETA)])
    assert (losses[0], by_chosen[0], by_rejected[0]) == pytest.approx((0, 0, 0), abs=1e-5)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", [30.0, 1000.0])
def test_extreme_answers_stay_finite(name, size):
    cases = [(-1e-9, -size), (-size, -1e-9), (0.0, 0.0)] if LOSSES[name].of_means else [(size, -size), (-size, size)]
    for array in values(name, *zip(*cases, strict=True)):
        assert np.isfinite(array).all()


def test_orpo_keeps_its_digits_near_certainty():
    (loss, *_), *_ = values("orpo", [-1e-5], [-3e-5])
    assert loss == pytest.approx(BETA * math.log1p(math.exp(-(log_odds(-1e-5) - log_odds(-3e-5)))), rel=1e-3)


def test_smoothing_none_is_the_plain_loss():
    plain = values("sigmoid", [1.0], [0.2], label_smoothing=0.0)[0][0]
    assert plain == pytest.approx(-math.log(s(BETA * (1.0 - 0.2 - OFFSETS))), rel=1e-6)


def test_who_needs_a_reference():
    free = {name for name in LOSSES if not needs_reference(PreferenceSettings(loss_type=name))}
    assert free == {"simpo", "orpo"}
    assert not needs_reference(PreferenceSettings(reference_free=True))

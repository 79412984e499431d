"""Every loss by hand, in float64, and its gradient by differences."""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erniekit.config.sections.dpo import DpoParameters
from erniekit.training.objectives.preference_losses import LOSSES, LossContext, needs_reference

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
    return LossContext(DpoParameters(loss_type=name, **values), OFFSETS, *KL)


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
    cases = MEANS if LOSSES[name].length_normalized else RATIOS
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


ratios = st.floats(-20, 20, width=32)
noises = st.floats(0.01, 0.45)
property_test = settings(max_examples=60, deadline=None, derandomize=True)


def loss_of(name, chosen, rejected, **changes):
    return float(values(name, [chosen], [rejected], **changes)[0][0])


def near(expected):
    return pytest.approx(expected, rel=1e-4, abs=2e-5)


@pytest.mark.parametrize("name", LOSSES)
@property_test
@given(chosen=st.floats(-12, -0.01), rejected=st.floats(-12, -0.01))
def test_any_answers_give_the_formula(name, chosen, rejected):
    assert loss_of(name, chosen, rejected) == pytest.approx(BY_HAND[name](chosen, rejected), rel=1e-4, abs=1e-5)


MONOTONE = sorted(set(LOSSES) - {"ipo", "sppo_hard", "nca_pair", "robust"})  # these have a goal to come back to


@pytest.mark.parametrize("name", MONOTONE)
@property_test
@given(chosen=st.floats(-3, -0.05), rejected=st.floats(-3, -0.05), more=st.floats(0.05, 1))
def test_a_better_chosen_or_a_worse_rejected_answer_never_costs(name, chosen, rejected, more):
    before = loss_of(name, chosen, rejected, label_smoothing=0.0)
    assert loss_of(name, min(chosen + more, -1e-3), rejected, label_smoothing=0.0) <= before + 1e-5
    assert loss_of(name, chosen, rejected - more, label_smoothing=0.0) <= before + 1e-5


@pytest.mark.parametrize("name", ["sigmoid", "robust", "hinge", "ipo", "simpo"])
@property_test
@given(chosen=ratios, rejected=ratios, both=ratios)
def test_losses_of_the_difference_see_nothing_else(name, chosen, rejected, both):
    assert loss_of(name, chosen + both, rejected + both) == near(loss_of(name, chosen, rejected))


@property_test
@given(chosen=ratios, rejected=ratios, noise=noises)
def test_the_robust_loss_is_right_on_average_over_exchanged_labels(chosen, rejected, noise):
    """What rDPO is made for: with labels exchanged at the given rate its mean is the loss of the true labels."""
    kept = float(LOSSES["robust"].function(*pair(chosen, rejected), without_offset("robust", noise)))
    exchanged = float(LOSSES["robust"].function(*pair(rejected, chosen), without_offset("robust", noise)))
    true = float(LOSSES["sigmoid"].function(*pair(chosen, rejected), without_offset("sigmoid", 0.0)))
    assert (1 - noise) * kept + noise * exchanged == pytest.approx(true, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", ["sigmoid", "simpo"])
@property_test
@given(chosen=ratios, rejected=ratios, noise=noises)
def test_a_smoothed_loss_is_the_mean_over_exchanged_labels(name, chosen, rejected, noise):
    plain = LOSSES[name].function
    calm = without_offset(name, 0.0, simpo_gamma=0.0)
    kept, exchanged = float(plain(*pair(chosen, rejected), calm)), float(plain(*pair(rejected, chosen), calm))
    smoothed = float(plain(*pair(chosen, rejected), without_offset(name, noise, simpo_gamma=0.0)))
    assert smoothed == near((1 - noise) * kept + noise * exchanged)


@property_test
@given(chosen=ratios, rejected=ratios)
def test_relations_between_losses(chosen, rejected):
    plain = {"label_smoothing": 0.0}
    calm = without_offset("sigmoid", 0.0)
    dpo, dpop = (float(LOSSES[name].function(*pair(chosen, rejected), calm)) for name in ("sigmoid", "dpop"))
    assert dpop == near(dpo) if chosen >= 0 else dpop >= dpo - 1e-5
    offset = float(LOSSES["sigmoid"].function(*pair(chosen - OFFSETS, rejected), calm))
    assert loss_of("sigmoid", chosen, rejected, **plain) == near(offset)
    goal = 1 / (2 * BETA)
    assert loss_of("ipo", goal + chosen, 0.0) == near(loss_of("ipo", goal - chosen, 0.0))
    assert 0 <= loss_of("kto_pair", chosen, rejected) <= 1
    assert loss_of("sppo_hard", chosen, rejected) == near(loss_of("sppo_hard", -rejected, -chosen))


def pair(chosen, rejected):
    return paddle.to_tensor(np.float32(chosen)), paddle.to_tensor(np.float32(rejected))


def without_offset(name, noise, **changes):
    return context(name, label_smoothing=noise, **changes)._replace(offsets=0.0)


@pytest.mark.parametrize("size", [60.0, 120.0])
def test_answers_that_are_already_apart_keep_their_small_gradient(size):
    """1 - s(h) would round to 0."""
    for name in ("sigmoid", "kto_pair"):
        _, by_chosen, _ = values(name, [size], [-size], label_smoothing=0.0)
        step = BETA * (2 * size - OFFSETS if name == "sigmoid" else size - KL[1])
        expected = -BETA * math.exp(-step) * (1.0 if name == "sigmoid" else 0.5)
        assert by_chosen[0] == pytest.approx(expected, rel=5e-3)


def test_goals_are_the_minima():
    assert values("ipo", [1 / (2 * BETA)], [0.0])[0][0] == pytest.approx(0)
    losses, by_chosen, by_rejected = values("sppo_hard", [1 / (2 * BETA)], [-1 / (2 * BETA)])
    assert (losses[0], by_chosen[0], by_rejected[0]) == pytest.approx((0, 0, 0), abs=1e-5)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", [30.0, 1000.0])
def test_extreme_answers_stay_finite(name, size):
    cases = (
        [(-1e-9, -size), (-size, -1e-9), (0.0, 0.0)]
        if LOSSES[name].length_normalized
        else [(size, -size), (-size, size)]
    )
    for array in values(name, *zip(*cases, strict=True)):
        assert np.isfinite(array).all()


def test_orpo_keeps_its_digits_near_certainty():
    (loss, *_), *_ = values("orpo", [-1e-5], [-3e-5])
    assert loss == pytest.approx(BETA * math.log1p(math.exp(-(log_odds(-1e-5) - log_odds(-3e-5)))), rel=1e-3)


def test_smoothing_none_is_the_plain_loss():
    plain = values("sigmoid", [1.0], [0.2], label_smoothing=0.0)[0][0]
    assert plain == pytest.approx(-math.log(s(BETA * (1.0 - 0.2 - OFFSETS))), rel=1e-6)


def test_who_needs_a_reference():
    free = {name for name in LOSSES if not needs_reference(DpoParameters(loss_type=name))}
    assert free == {"simpo", "orpo"}
    assert not needs_reference(DpoParameters(reference_free=True))

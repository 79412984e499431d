"""The cross entropy kernel against float64, on odd vocabularies, extreme logits and broken ones."""

from __future__ import annotations

import numpy as np
import pytest

from .arrays import Output, kernel

pytestmark = pytest.mark.usefixtures("native_path")


def cross_entropy(logits, targets, weights=None, in_place=False):
    """Return losses, whether targets are the largest, and the gradient by the logits."""
    rows = logits.shape[0]
    losses, is_correct = Output(rows), Output(rows, dtype=np.uint8)
    grad = Output(*logits.shape, values=logits if in_place else 0)
    targets = np.asarray(targets, np.int64)
    kernel("cross_entropy", "llpppppp")(
        *logits.shape, grad.pointer if in_place else logits.ctypes.data, targets.ctypes.data,
        None if weights is None else weights.ctypes.data, losses.pointer, is_correct.pointer, grad.pointer,
    )  # fmt: skip
    return losses.read(), is_correct.read(), grad.read()


def expected(logits, targets, weights):
    wide = logits.astype(np.float64)
    powers = np.exp(wide - wide.max(-1, keepdims=True))
    rows = np.arange(len(targets))
    losses = wide.max(-1) + np.log(powers.sum(-1)) - wide[rows, targets]
    grad = powers / powers.sum(-1, keepdims=True)
    grad[rows, targets] -= 1
    return losses, grad * weights[:, None]


@pytest.mark.parametrize("vocabulary", [1, 7, 17, 64, 255, 1031])
@pytest.mark.parametrize("in_place", [True, False])
def test_losses_and_gradients_are_those_of_the_formula(vocabulary, in_place):
    rng = np.random.default_rng(vocabulary)
    logits, weights = (5 * rng.standard_normal((9, vocabulary))).astype(np.float32), rng.random(9).astype(np.float32)
    targets = rng.integers(0, vocabulary, 9)
    targets[:3] = logits[:3].argmax(-1)
    losses, is_correct, grad = cross_entropy(logits, targets, weights, in_place)
    expected_losses, expected_grad = expected(logits, targets, weights)
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(grad, expected_grad, atol=1e-6)
    assert np.array_equal(is_correct.astype(bool), logits.argmax(-1) == targets)
    assert np.array_equal(cross_entropy(logits, targets)[0], losses)  # which weights leave alone


def test_only_what_is_asked_for_is_computed():
    logits, targets = np.zeros((2, 20), np.float32), np.array([3, 4])
    before, losses = logits.copy(), Output(2)
    function = kernel("cross_entropy", "llpppppp")
    function(2, 20, logits.ctypes.data, targets.ctypes.data, None, losses.pointer, Output(2).pointer, None)
    assert np.array_equal(logits, before) and losses.read() == pytest.approx(np.log(20))
    grad = Output(2, 20)
    function(2, 20, logits.ctypes.data, targets.ctypes.data, None, None, None, grad.pointer)
    assert grad.read()[0, 3] == pytest.approx(-0.95) and grad.read().sum() == pytest.approx(0, abs=1e-6)


def test_of_equal_largest_logits_only_the_first_is_correct():
    logits = np.zeros((3, 40), np.float32)
    logits[:, [5, 33]] = 2
    assert cross_entropy(logits, [5, 33, 0])[1].tolist() == [1, 0, 0]


def test_logits_of_any_size_give_finite_losses():
    logits = np.full((2, 50), -3e38, np.float32)
    logits[:, 7] = 3e38
    logits[1, :7] = -np.inf
    losses, _, grad = cross_entropy(logits, [7, 7])
    assert losses.tolist() == [0, 0] and not grad.any()
    assert cross_entropy(np.float32([[1000, 0]] * 2), [0, 1])[0].tolist() == [0, 1000]


@pytest.mark.parametrize("column", [0, 20, 49])
def test_a_logit_that_is_not_a_number_is_seen_in_the_loss(column):
    logits = np.zeros((1, 50), np.float32)
    logits[0, column] = np.nan
    losses, is_correct, grad = cross_entropy(logits, [3])
    assert np.isnan(losses).all() and not is_correct.any() and np.isnan(grad).all()


@pytest.mark.parametrize("target", [-100, 50, 2**40])
def test_a_target_outside_of_the_vocabulary_writes_nothing_there(target):
    losses, is_correct, grad = cross_entropy(np.zeros((1, 50), np.float32), [target])
    assert np.isnan(losses).all() and not is_correct.any()
    np.testing.assert_allclose(grad, 0.02, rtol=1e-6)

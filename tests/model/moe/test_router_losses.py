"""The losses of routers: values by hand, gradients by finite differences, and how they join the run's gradient."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from erniekit.model.moe.router import add_gradient, balance_loss, orthogonal_loss, token_weights, z_loss

RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((7, 5)).astype(np.float32)
IS_TOKEN = np.array([1, 1, 0, 1, 1, 1, 0], np.float32)


def softmax(logits):
    powers = np.exp(logits.astype(np.float64))
    return powers / powers.sum(1, keepdims=True)


def shares(is_token=None, tokens=7):
    return token_weights(paddle.zeros([tokens, 5]), None if is_token is None else paddle.to_tensor(is_token))


def balance_by_hand(probabilities, k, is_token=None):
    rows = probabilities if is_token is None else probabilities[is_token > 0]
    counts = np.zeros(rows.shape[1])
    for row in rows:
        counts[np.argsort(-row)[:k]] += 1
    return rows.shape[1] * (counts / len(rows) * rows.mean(0)).sum()


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("is_token", [None, IS_TOKEN])
def test_balance_loss_by_hand(k, is_token):
    probabilities = softmax(LOGITS).astype(np.float32)
    own = float(balance_loss(paddle.to_tensor(probabilities), k, shares(is_token)))
    assert own == pytest.approx(balance_by_hand(probabilities, k, is_token), rel=1e-5)


def test_balance_loss_is_k_where_experts_are_used_evenly():
    turns = np.full((4, 4), 0.1, np.float32) + 0.3 * np.eye(4, dtype=np.float32) + 0.3 * np.roll(np.eye(4), 1, 1)
    assert float(balance_loss(paddle.to_tensor(turns.astype(np.float32)), 2, shares(tokens=4))) == pytest.approx(
        2.0, rel=1e-6
    )


@pytest.mark.parametrize("is_token", [None, IS_TOKEN])
def test_z_loss_by_hand(is_token):
    squares = np.log(np.exp(LOGITS.astype(np.float64)).sum(1)) ** 2
    expected = squares.mean() if is_token is None else squares[is_token > 0].mean()
    assert float(z_loss(paddle.to_tensor(LOGITS), shares(is_token))) == pytest.approx(expected, rel=1e-5)


def test_padding_alone_has_no_loss():
    share = shares(np.zeros(7, np.float32))
    assert float(z_loss(paddle.to_tensor(LOGITS), share)) == 0.0
    assert float(balance_loss(paddle.to_tensor(softmax(LOGITS).astype(np.float32)), 2, share)) == 0.0


def test_orthogonal_loss_by_hand():
    weight = RNG.standard_normal((3, 6)).astype(np.float32)
    cosines = [[a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a in weight] for b in weight]
    expected = np.mean((np.array(cosines) - np.eye(3)) ** 2)
    assert float(orthogonal_loss(paddle.to_tensor(weight))) == pytest.approx(expected, rel=1e-5)
    assert float(orthogonal_loss(paddle.eye(4, 7) * 3.0)) == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize(
    ("loss", "size"),
    [
        (lambda x: balance_loss(paddle.nn.functional.softmax(x), 2, shares(IS_TOKEN)), (7, 5)),
        (lambda x: z_loss(x, shares(IS_TOKEN)), (7, 5)),
        (orthogonal_loss, (4, 6)),
    ],
    ids=["balance", "z", "orthogonal"],
)
def test_gradients_are_those_of_finite_differences(loss, size):
    values = np.random.default_rng(3).standard_normal(size).astype(np.float32)
    x = paddle.to_tensor(values, stop_gradient=False)
    loss(x).backward()
    for index in [(0, 0), (2, 3), (3, 4)]:
        step = np.zeros(size, np.float32)
        step[index] = 1e-2
        slope = (float(loss(paddle.to_tensor(values + step))) - float(loss(paddle.to_tensor(values - step)))) / 2e-2
        assert float(x.grad[index]) == pytest.approx(slope, abs=2e-4)


def test_a_joined_loss_is_minimised_and_leaves_the_value_alone():
    value = paddle.to_tensor([1.0, 2.0], stop_gradient=False)
    weight = paddle.to_tensor([3.0], stop_gradient=False)
    joined = add_gradient(value, (weight * weight).sum(), 0.25)
    np.testing.assert_array_equal(joined.numpy(), value.numpy())
    (joined * 10.0).sum().backward()
    np.testing.assert_array_equal(value.grad.numpy(), [10.0, 10.0])
    assert weight.grad.item() == pytest.approx(0.25 * 6.0)  # whatever the value's own gradient is


def test_a_loss_without_gradient_is_not_joined():
    value = paddle.to_tensor([1.0], stop_gradient=False)
    assert add_gradient(value, paddle.to_tensor(2.0), 1.0) is value

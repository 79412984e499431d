"""Divergences and their gradients against sums written out in float64, and against differences."""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest

from erniekit.model.divergence import Divergence, first_choices, log_softmax, one_hot, row_divergences
from erniekit.model.tensor_parallel import NO_TENSOR_PARALLEL

random = np.random.default_rng(7)
STUDENT, TEACHER = (random.normal(size=(3, 5)) * 2 for _ in range(2))
KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1), ("jsd", 0.9)]


def by_hand(student: np.ndarray, teacher: np.ndarray, kind: str, beta: float, temperature: float) -> list[float]:
    values = []
    for s, t in zip(student / temperature, teacher / temperature, strict=True):
        p = [math.exp(each) / sum(map(math.exp, s)) for each in s]
        q = [math.exp(each) / sum(map(math.exp, t)) for each in t]
        m = [beta * b + (1 - beta) * a for a, b in zip(p, q, strict=True)]

        def kl(a: list[float], b: list[float]) -> float:
            return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)

        value = {"forward_kl": kl(q, p), "reverse_kl": kl(p, q), "jsd": beta * kl(q, m) + (1 - beta) * kl(p, m)}[kind]
        values.append(value * temperature**2)
    return values


def ours(student: np.ndarray, teacher: np.ndarray, kind: str, beta: float, temperature: float) -> list[np.ndarray]:
    p, q = (log_softmax(paddle.to_tensor(each), NO_TENSOR_PARALLEL, temperature) for each in (student, teacher))
    found = row_divergences(p, q, Divergence(kind, beta, temperature), NO_TENSOR_PARALLEL)
    return [each.numpy() for each in found]


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_values_and_gradients(kind: str, beta: float, temperature: float) -> None:
    values, gradient = ours(STUDENT, TEACHER, kind, beta, temperature)
    assert values.dtype == np.float64
    np.testing.assert_allclose(values, by_hand(STUDENT, TEACHER, kind, beta, temperature), rtol=1e-12)
    step = 1e-6
    for column in range(5):
        moved = [STUDENT + sign * step * np.eye(5)[column] for sign in (1, -1)]
        up, down = (np.array(by_hand(each, TEACHER, kind, beta, temperature)) for each in moved)
        np.testing.assert_allclose(gradient[:, column], (up - down) / (2 * step), atol=1e-8)


@pytest.mark.parametrize(("kind", "beta"), [("forward_kl", 0.5), ("jsd", 0.3)])
def test_a_teacher_may_give_no_probability(kind: str, beta: float) -> None:
    teacher = np.where(np.arange(5) < 2, TEACHER, -800.0)
    values, gradient = ours(STUDENT, teacher, kind, beta, 1.0)
    exact = np.where(np.arange(5) < 2, TEACHER, -np.inf)
    log_q = exact - np.log(np.exp(exact).sum(1, keepdims=True))
    p = log_softmax(paddle.to_tensor(STUDENT), NO_TENSOR_PARALLEL)
    found = row_divergences(p, paddle.to_tensor(log_q), Divergence(kind, beta), NO_TENSOR_PARALLEL)
    np.testing.assert_allclose(found[0].numpy(), values, rtol=1e-12)
    np.testing.assert_allclose(found[1].numpy(), gradient, atol=1e-12)
    assert np.isfinite(found[1].numpy()).all()


def test_logits_far_apart_stay_finite() -> None:
    student, teacher = np.array([[0.0, 3000.0]]), np.array([[3000.0, 0.0]])
    for kind, beta in KINDS:
        values, gradient = ours(student, teacher, kind, beta, 1.0)
        assert np.isfinite(values).all() and np.isfinite(gradient).all(), kind


def test_first_choices_and_one_hot() -> None:
    scores = paddle.to_tensor([[1.0, 5.0, 5.0], [2.0, 0.0, 1.0]])
    assert first_choices(scores, NO_TENSOR_PARALLEL).tolist() == [1, 0]
    assert one_hot(paddle.to_tensor([2, 0]), scores, NO_TENSOR_PARALLEL).tolist() == [[0, 0, 1], [1, 0, 0]]

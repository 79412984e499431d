"""Attention over windows against the formula in plain operations: values, gradients, and what is computed."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from erniekit.model.encoders import window_attention
from erniekit.model.encoders.window_attention import WindowAttention

LENGTH, HEADS, SIZE = 12, 2, 4
SEEN = (12, 5, 1)


def random(seed: int) -> paddle.Tensor:
    values = np.random.default_rng(seed).standard_normal((len(SEEN), LENGTH, HEADS, SIZE))
    return paddle.to_tensor(values.astype(np.float32), stop_gradient=False)


def plain(q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor) -> paddle.Tensor:
    outputs = []
    for window, seen in enumerate(SEEN):
        scores = paddle.einsum("qhd,khd->hqk", q[window], k[window, :seen]) / SIZE**0.5
        probabilities = paddle.exp(scores) / paddle.exp(scores).sum(-1, keepdim=True)
        outputs.append(paddle.einsum("hqk,khd->qhd", probabilities, v[window, :seen]))
    return paddle.stack(outputs)


def with_gradients(function) -> list[np.ndarray]:
    inputs = [random(seed) for seed in range(3)]
    out = function(*inputs)
    (out * random(3).detach()).sum().backward()
    return [out.numpy(), *(x.grad.numpy() for x in inputs)]


@pytest.fixture
def paddle_operators(monkeypatch):
    monkeypatch.setattr(window_attention, "has_native_attention", lambda *_: False)


@pytest.mark.parametrize("saved", [4 << 20, 0])
@pytest.mark.parametrize("at_once", [1 << 20, 2 * LENGTH**2, 4 * LENGTH**2, 50])
def test_parts_and_tiles_give_the_values_and_gradients_of_the_formula(saved, at_once, monkeypatch, paddle_operators):
    monkeypatch.setattr(window_attention, "MAX_SAVED_SCORES", saved)
    monkeypatch.setattr(window_attention, "MAX_SCORES", at_once)
    for found, expected in zip(with_gradients(WindowAttention(SEEN).attend), with_gradients(plain), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_the_kernel_gives_the_values_and_gradients_of_the_formula():
    for found, expected in zip(with_gradients(WindowAttention(SEEN).attend), with_gradients(plain), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("kernel", [True, False])
def test_inputs_without_gradients_get_none(kernel, request):
    if not kernel:
        request.getfixturevalue("paddle_operators")
    q, k, v = (random(seed) for seed in range(3))
    q.stop_gradient = True
    WindowAttention(SEEN).attend(q, k, v).sum().backward()
    assert q.grad is None and k.grad is not None and v.grad is not None


def test_long_windows_are_cut_into_tiles_of_the_keys_that_are_seen():
    parts = window_attention._parts([1500, 500], 1500, 2)
    assert [part.keys for part in parts] == [1500, 1500, 500, 500]
    assert all(1500 * (tile.stop - tile.start) <= window_attention.MAX_SCORES for part in parts for tile in part.tiles)
    (part,) = window_attention._parts([50] * 16, 50, 4)
    assert part.rows == slice(0, 64) and part.tiles == (slice(0, 50),)

"""The functions with gradients of our own against Paddle's."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from erniekit.model import cpu_gradients
from erniekit.model.cpu_gradients import LayerNorm

ROWS, SIZE = [3, 5], 8


def tensor(seed: int, shape: list[int]) -> paddle.Tensor:
    values = np.random.default_rng(seed).normal(1, 2, shape).astype(np.float32)
    return paddle.to_tensor(values, stop_gradient=False)


def results(function, *inputs):
    """The output and the gradients."""
    out = function(*inputs)
    (out * tensor(9, out.shape).detach()).sum().backward()
    return [out.numpy(), *(x.grad.numpy() for x in inputs)]


PAIRS = {
    "bias": (cpu_gradients.add_bias, lambda x, b: x + b, [[*ROWS, SIZE], [SIZE]]),
    "linear": (cpu_gradients.linear, F.linear, [[*ROWS, SIZE], [SIZE, 6], [6]]),
    "gelu": (cpu_gradients.gelu, F.gelu, [[*ROWS, SIZE]]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_values_and_gradients_are_those_of_paddle(name):
    own, paddles, shapes = PAIRS[name]
    found, expected = (
        results(function, *(tensor(seed, shape) for seed, shape in enumerate(shapes))) for function in (own, paddles)
    )
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-6, atol=2e-6)


def test_layer_norm_has_the_values_and_gradients_of_paddle():
    own, paddles = LayerNorm(SIZE, 1e-5), paddle.nn.LayerNorm(SIZE, 1e-5)
    found = []
    for layer in (own, paddles):
        layer.weight.set_value(tensor(1, [SIZE]))
        layer.bias.set_value(tensor(2, [SIZE]))
        found.append([*results(layer, tensor(0, [*ROWS, SIZE])), layer.weight.grad.numpy(), layer.bias.grad.numpy()])
    np.testing.assert_array_equal(found[0][0], found[1][0])
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


def test_what_is_frozen_gets_no_gradient():
    x, layer = tensor(0, [*ROWS, SIZE]), LayerNorm(SIZE)
    layer.weight.stop_gradient = True
    layer(x).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is not None and x.grad is not None


def test_gelu_has_the_same_bits_without_a_gradient():
    x = tensor(0, [50, SIZE])
    with paddle.no_grad():
        alone = cpu_gradients.gelu(x)
    assert alone.stop_gradient and np.array_equal(alone.numpy(), cpu_gradients.gelu(x).numpy())

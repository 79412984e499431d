"""Gated activations in C against their formulas in float64, of any size and on any number of threads."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import paddle
import pytest

from erniekit.model import mlp
from erniekit.native import library

GUARD = 99.0
RNG = np.random.default_rng(0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def swiglu(g, u):
    s = sigmoid(g)
    return g * s * u, u * (s + g * s * (1 - s)), g * s


def geglu_tanh(g, u):
    z = np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)
    t = np.tanh(z)
    slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * g**2)
    return 0.5 * g * (1 + t) * u, u * (0.5 * (1 + t) + 0.5 * g * (1 - t**2) * slope), 0.5 * g * (1 + t)


def clamped_swiglu(g, u):
    passes_g, passes_u = g <= 7, np.abs(u) <= 7
    g, u = np.minimum(g, 7), np.clip(u, -7, 7)
    s = sigmoid(1.702 * g)
    return g * s * (u + 1), passes_g * (u + 1) * (s + 1.702 * g * s * (1 - s)), passes_u * g * s


FORMULAS = {"swiglu": swiglu, "geglu_tanh": geglu_tanh, "clamped_swiglu": clamped_swiglu}
SIZES = (0, 1, 7, 15, 16, 17, 255, 1000, 16_385, 40_001)


def guarded(size: int) -> np.ndarray:
    return np.full(size + 64, GUARD, np.float32)


def forward(name: str, gate: np.ndarray, up: np.ndarray, y: np.ndarray) -> None:
    compute = library.function("activation_forward", "llppp")
    compute(mlp.ACTIVATION_KINDS[name], gate.size, *map(address, (gate, up, y)))


def backward(name: str, gate: np.ndarray, up: np.ndarray, grad: np.ndarray, *gradients: np.ndarray) -> None:
    compute = library.function("activation_backward", "llppppp")
    compute(mlp.ACTIVATION_KINDS[name], gate.size, *map(address, (gate, up, grad, *gradients)))


def address(array: np.ndarray) -> int:
    return array.ctypes.data


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FORMULAS)
def test_values_and_gradients_equal_the_formula(native_path, name, size) -> None:
    gate, up, grad = (RNG.standard_normal(size).astype(np.float32) * scale for scale in (5, 4, 1))
    y, gate_grad, up_grad = guarded(size), guarded(size), guarded(size)
    forward(name, gate, up, y)
    backward(name, gate, up, grad, gate_grad, up_grad)
    value, by_gate, by_up = FORMULAS[name](gate.astype(np.float64), up.astype(np.float64))
    for actual, expected in ((y, value), (gate_grad, grad * by_gate), (up_grad, grad * by_up)):
        np.testing.assert_allclose(actual[:size], expected, rtol=3e-6, atol=3e-6)
        assert (actual[size:] == GUARD).all()


@pytest.mark.parametrize("name", FORMULAS)
def test_extremes_stay_finite_and_nan_is_seen(native_path, name) -> None:
    gate = np.array([-1e30, -200, -90, -88, 0, 88, 200, 1e18, np.nan, 1], np.float32)
    up = np.array([1, 1, 1, 1, 1, 1, 1, 1, 1, np.nan], np.float32)
    y = np.empty_like(gate)
    forward(name, gate, up, y)
    assert np.isfinite(y[:8]).all() and np.isnan(y[8:]).all()
    np.testing.assert_allclose(y[:5], 0, atol=1e-6)


@pytest.mark.parametrize("name", FORMULAS)
def test_threads_do_not_change_a_bit(native_path, name) -> None:
    size = 40_001
    gate, up = (RNG.standard_normal(size).astype(np.float32) for _ in range(2))
    set_threads = ctypes.CDLL(str(Path(paddle.__file__).parent / "libs/libiomp5.so")).omp_set_num_threads
    results = []
    try:
        for threads in (1, 2, 3):
            set_threads(threads)
            results.append(np.empty_like(gate))
            forward(name, gate, up, results[-1])
    finally:
        set_threads(2)
    assert (results[0] == results[1]).all() and (results[0] == results[2]).all()


def both_ways(name: str, gate: np.ndarray, up: np.ndarray, frozen: bool = False) -> list[np.ndarray | None]:
    inputs = [paddle.to_tensor(gate, stop_gradient=frozen), paddle.to_tensor(up, stop_gradient=False)]
    out = mlp.ACTIVATIONS[name](*inputs)
    (out * paddle.to_tensor(np.cos(up))).sum().backward()
    return [out.numpy()] + [None if tensor.grad is None else tensor.grad.numpy() for tensor in inputs]


@pytest.mark.parametrize("shape", [(2, 3, 5), (0, 8), (3, 64)])
@pytest.mark.parametrize("name", FORMULAS)
def test_the_model_computes_the_same_with_paddles_operators(native_path, monkeypatch, name, shape) -> None:
    gate, up = (RNG.standard_normal(shape).astype(np.float32) * 4 for _ in range(2))
    ran = []
    monkeypatch.setattr(mlp._NativeActivation, "forward", _noting(ran, mlp._NativeActivation.forward))
    ours, frozen = both_ways(name, gate, up), both_ways(name, gate, up, frozen=True)
    assert len(ran) == 2
    library.use("paddle")
    for mine, paddles in zip(ours, both_ways(name, gate, up), strict=True):
        largest = np.abs(paddles).max(initial=0)
        np.testing.assert_allclose(mine, paddles, rtol=0, atol=1e-5 * largest)
    assert len(ran) == 2
    assert frozen[1] is None and (frozen[2] == ours[2]).all()


def _noting(ran: list[int], function):
    def noted(*arguments):
        ran.append(1)
        return function(*arguments)

    return staticmethod(noted)

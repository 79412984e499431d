"""AdamW in C against its formula in float64, and against Paddle's operator in a run of updates."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from erniekit.config.sections.training import TrainingParameters
from erniekit.model import native
from erniekit.native import library
from erniekit.training.optim.adamw import build_optimizer, optimizer_state

GUARD = 99.0
BETA1, BETA2, EPSILON, RATE = 0.9, 0.95, 1e-8, 0.01


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("size", [0, 1, 7, 17, 255, 16_385, 40_001])
def test_an_update_is_the_formula(native_path, size, decay) -> None:
    rng, step = np.random.default_rng(1), 3
    arrays = [np.full(size + 64, GUARD, np.float32) for _ in range(4)]
    weight, grad, m, v = (array[:size] for array in arrays)
    for array in (weight, grad, m, v):
        array[...] = rng.standard_normal(size)
    v[...] = np.abs(v)
    w0, g, m0, v0 = (array.astype(np.float64) for array in (weight, grad, m, v))
    numbers = [np.array([value], np.float32) for value in (RATE, BETA1**step, BETA2**step)]
    update = library.function("adamw", "lpppppppffff")
    update(size, *(array.ctypes.data for array in (*arrays, *numbers)), BETA1, BETA2, EPSILON, decay)
    m1, v1 = BETA1 * m0 + (1 - BETA1) * g, BETA2 * v0 + (1 - BETA2) * g * g
    hat_m, hat_v = m1 / (1 - BETA1**step), v1 / (1 - BETA2**step)
    expected = w0 - RATE * (hat_m / (np.sqrt(hat_v) + EPSILON) + decay * w0)
    for actual, wanted in ((weight, expected), (m, m1), (v, v1), (grad, g)):
        np.testing.assert_allclose(actual, wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose([n[0] for n in numbers], [RATE, BETA1 ** (step + 1), BETA2 ** (step + 1)], rtol=1e-6)
    assert all((array[size:] == GUARD).all() for array in arrays)


def updates(dtype: str = "float32") -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return weights and state after three updates of two matrices and a vector, each at a rate of its own."""
    rng = np.random.default_rng(2)
    shapes = {"layers.0.weight": (5, 7), "layers.1.weight": (130, 140), "norm.weight": (7,)}
    named = {name: paddle.create_parameter(shape, dtype) for name, shape in shapes.items()}
    for parameter in named.values():
        parameter.set_value(rng.standard_normal(parameter.shape).astype(dtype))
    section = TrainingParameters(weight_decay=0.1, layerwise_lr_decay_bound=0.5)
    optimizer = build_optimizer(named, section, num_layers=2)
    for _ in range(3):
        for parameter in named.values():
            parameter.grad = paddle.to_tensor(rng.standard_normal(parameter.shape).astype(dtype))
        optimizer.set_lr(RATE)
        optimizer.step()
    state = {name: tensor.numpy() for name, tensor in optimizer_state(optimizer, named).items()}
    return {name: parameter.numpy() for name, parameter in named.items()}, state


@pytest.fixture
def updated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that were asked for and that ran."""
    ran: list[str] = []
    real = native.kernel

    def kernel(name, *others):
        found = real(name, *others)
        ran.extend([] if found is None else [name])
        return found

    monkeypatch.setattr(native, "kernel", kernel)
    return ran


def test_updates_equal_those_of_paddles_operator(native_path, updated) -> None:
    weights, state = updates()
    assert updated == ["adamw"] * 9
    library.use("paddle")
    paddles_weights, paddles_state = updates()
    assert len(updated) == 9
    for ours, theirs in ((weights, paddles_weights), (state, paddles_state)):
        assert ours.keys() == theirs.keys()
        for name, values in ours.items():
            np.testing.assert_allclose(values, theirs[name], rtol=2e-6, atol=2e-7, err_msg=name)


def test_equal_updates_give_equal_bits(native_path) -> None:
    first, second = updates(), updates()
    assert all((first[0][name] == second[0][name]).all() for name in first[0])


def test_paddles_operator_updates_other_types(native_path, updated) -> None:
    updates("float64")
    assert updated == []

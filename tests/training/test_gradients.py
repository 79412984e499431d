"""The global norm and clipping by it, against Paddle's own clipping and NumPy."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from erniekit.training.gradients import clip_by_norm, fill_missing_gradients, global_norm


def parameters_with_gradients(scale: float = 1.0) -> list[paddle.Tensor]:
    generator = np.random.default_rng(5)
    layer = paddle.nn.Layer()
    parameters = []
    for shape in ([5, 4], [4], [2, 3]):
        parameter = layer.create_parameter(shape)
        parameter.grad = paddle.to_tensor((scale * generator.standard_normal(shape)).astype(np.float32))
        parameters.append(parameter)
    return parameters


def numpy_norm(parameters: list[paddle.Tensor]) -> float:
    return float(np.sqrt(sum((p.grad.numpy().astype(np.float64) ** 2).sum() for p in parameters)))


def test_norm_of_all_gradients_as_one_vector() -> None:
    parameters = parameters_with_gradients()
    assert float(global_norm(parameters)) == pytest.approx(numpy_norm(parameters), rel=1e-6)


def test_norm_of_a_large_tensor_keeps_its_precision() -> None:
    """Squares added one after the other in fp32 are half a percent off here."""
    parameter = paddle.nn.Layer().create_parameter([4, 1_000_000])
    parameter.grad = paddle.full([4, 1_000_000], 0.1)
    assert float(global_norm([parameter])) == pytest.approx(200.0, rel=1e-5)


@pytest.mark.parametrize("max_norm", [0.5, 3.0])
def test_equal_to_paddles_clipping(max_norm: float) -> None:
    ours, theirs = parameters_with_gradients(), parameters_with_gradients()
    clip_by_norm(ours, float(global_norm(ours)), max_norm)
    clipped = paddle.nn.ClipGradByGlobalNorm(max_norm)([(p, p.grad) for p in theirs])
    for own, (_, gradient) in zip(ours, clipped, strict=True):
        np.testing.assert_allclose(own.grad.numpy(), gradient.numpy(), rtol=1e-6)
    assert numpy_norm(ours) == pytest.approx(max_norm, rel=1e-5)


@pytest.mark.parametrize("max_norm", [0.0, 1e6])
def test_off_or_below_the_bound_changes_nothing(max_norm: float) -> None:
    parameters = parameters_with_gradients()
    before = [p.grad.numpy().copy() for p in parameters]
    clip_by_norm(parameters, float(global_norm(parameters)), max_norm)
    for parameter, gradient in zip(parameters, before, strict=True):
        np.testing.assert_array_equal(parameter.grad.numpy(), gradient)


def test_missing_gradients_become_zero() -> None:
    present, missing = parameters_with_gradients()[0], paddle.nn.Layer().create_parameter([4])
    before = present.grad.numpy().copy()
    fill_missing_gradients([present, missing])
    np.testing.assert_array_equal(missing.grad.numpy(), np.zeros(4, dtype=np.float32))
    np.testing.assert_array_equal(present.grad.numpy(), before)

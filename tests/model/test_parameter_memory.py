"""Layers begin without memory, and weights are written where the parameters keep them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest

from erniekit.model.builder import build_model
from erniekit.model.parameter_memory import allocate, host_array, place_rows, without_memory
from erniekit.model.weights import named_weights, save_model_folder
from erniekit.native import library

from .tiny import tiny_config, tiny_model


def test_parameters_get_memory_once() -> None:
    with without_memory():
        layer = paddle.nn.Linear(3, 5)
    assert not layer.weight._is_initialized()
    allocate(layer.weight)
    values = host_array(layer.weight)
    assert values is not None and values.shape == (3, 5)
    values[:] = 2.0
    allocate(layer.weight)
    np.testing.assert_array_equal(layer.weight.numpy(), values)
    assert not layer.weight.stop_gradient


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_are_placed_whatever_the_type(dtype: str, transposed: bool) -> None:
    """16 bits, which NumPy cannot write, go through Paddle."""
    parameter = paddle.zeros([4, 6], dtype)
    values = np.arange(24, dtype=np.float32).reshape(6, 4) if transposed else np.arange(24.0).reshape(4, 6)
    with paddle.no_grad():
        place_rows(parameter, slice(1, 3), values[1:3], transposed=transposed)
        place_rows(parameter, slice(0, 1), values[:1], transposed=transposed)
        place_rows(parameter, slice(3, len(values)), values[3:], transposed=transposed)
    np.testing.assert_array_equal(parameter.astype("float64").numpy(), values.T if transposed else values)


def test_a_write_is_a_new_version() -> None:
    """What was made of a parameter's earlier values is recognised as out of date."""
    parameter = paddle.create_parameter([2], "float32")
    before = parameter.inplace_version
    place_rows(parameter, slice(0, 2), np.ones(2, np.float32), transposed=False)
    assert parameter.inplace_version > before


def test_models_are_the_same_without_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a seed and from files; every parameter has memory then."""
    save_model_folder(tiny_model(seed=3), tmp_path)
    folders = (None, tmp_path)
    with_kernels = [named_weights(build_model(tiny_config(), folder, seed=5)) for folder in folders]
    monkeypatch.setattr(library, "function", lambda name, arguments: None)
    for folder, expected in zip(folders, with_kernels, strict=True):
        model = build_model(tiny_config(), folder, seed=5)
        assert {id(weight) for weight in named_weights(model).values()} == {id(own) for own in model.parameters()}
        for name, weight in named_weights(model).items():
            np.testing.assert_array_equal(weight.numpy(), expected[name].numpy(), err_msg=name)

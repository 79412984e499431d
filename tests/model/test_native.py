"""Which tensors native kernels compute with."""

from __future__ import annotations

import paddle
import pytest

from erniekit.model import native
from erniekit.native import library


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(library, "function", lambda name, arguments: (name, arguments))


def test_contiguous_float32_tensors_on_a_cpu(kernels):
    x = paddle.ones([3, 4])
    assert native.kernel("activation_forward", "llppp", x, x) == ("activation_forward", "llppp")


OTHERS = {
    "float64": lambda: paddle.ones([3, 4], "float64"),
    "bfloat16": lambda: paddle.ones([3, 4], "bfloat16"),
    "transposed": lambda: paddle.ones([3, 4]).T,
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_paddles_operators_take_all_others(kernels, other):
    assert native.kernel("activation_forward", "llppp", paddle.ones([3, 4]), other()) is None


@pytest.mark.parametrize(("question", "answer"), [("get_device", "gpu:0"), ("in_dynamic_mode", False)])
def test_paddles_operators_run_on_other_devices_and_in_programs(kernels, monkeypatch, question, answer):
    x = paddle.ones([3, 4])
    monkeypatch.setattr(paddle, question, lambda: answer)
    assert native.kernel("activation_forward", "llppp", x) is None

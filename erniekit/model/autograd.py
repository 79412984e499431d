"""Calling autograd functions of our own, whether Paddle computes at once or records a program."""

from __future__ import annotations

from typing import Any

import paddle
from paddle.autograd import PyLayer


class _NoGradient:
    """Stands in for the context of a function whose backward pass will never run."""

    def save_for_backward(self, *tensors: paddle.Tensor) -> None:
        """Nothing is kept."""


def apply(function: type[PyLayer], *arguments: Any) -> Any:
    """`function.apply(...)`; while a program is recorded (`jit.save`) its forward pass alone, as plain operations.

    A saved model computes no gradients, and neither ONNX nor Paddle's optimisations of programs know a PyLayer.
    """
    if paddle.in_dynamic_mode():
        return function.apply(*arguments)
    # `to_static` wraps every PyLayer that it meets, this argument too
    return getattr(function, "dyfunc_self", function).forward(_NoGradient(), *arguments)

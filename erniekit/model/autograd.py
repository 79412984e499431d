"""Calling autograd functions of our own, whether Paddle computes at once or records a program."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import paddle
from paddle.autograd import PyLayer


def needs_grad(*inputs: paddle.Tensor) -> tuple[bool, ...]:
    """Which inputs want a gradient; asked in forward, for what recomputation brings back no longer tells."""
    return tuple(not tensor.stop_gradient for tensor in inputs)


def filter_gradients(
    gradients: Sequence[paddle.Tensor], needs_input_grad: Sequence[bool]
) -> tuple[paddle.Tensor | None, ...]:
    """The gradients of a backward pass, None where Paddle insists on none (beside frozen weights)."""
    return tuple(gradient if want else None for gradient, want in zip(gradients, needs_input_grad, strict=True))


def disable_autocast() -> AbstractContextManager[Any]:
    """Inside, mixed precision casts no operand: a backward pass of our own must meet what its forward pass met."""
    if paddle.base.framework._dygraph_tracer()._amp_level == paddle.base.core.AmpLevel.O0:
        return nullcontext()
    return paddle.amp.auto_cast(enable=False)


def autocast_operand(x: paddle.Tensor) -> paddle.Tensor:
    """x in the type in which mixed precision multiplies; for products of our own, which it does not reach."""
    tracer = paddle.base.framework._dygraph_tracer() if paddle.in_dynamic_mode() else None
    if tracer is None or tracer._amp_level == paddle.base.core.AmpLevel.O0:
        return x
    return x.astype(tracer._amp_dtype)


class _NoGradContext:
    """Stands in for the context of a function whose backward pass will never run."""

    def save_for_backward(self, *tensors: paddle.Tensor) -> None:
        """Nothing is kept."""


def apply(function: type[PyLayer], *arguments: Any) -> Any:
    """`function.apply(...)`; while a program is recorded (`jit.save`) its forward pass alone, as plain operations.

    A saved model computes no gradients, and neither ONNX nor Paddle's optimisations of programs know a PyLayer.
    """
    if paddle.in_dynamic_mode():
        with disable_autocast():
            return function.apply(*arguments)
    # `to_static` wraps every PyLayer that it meets, this argument too
    return getattr(function, "dyfunc_self", function).forward(_NoGradContext(), *arguments)

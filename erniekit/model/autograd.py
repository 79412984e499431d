"""Call custom autograd functions, both in eager mode and while Paddle records a program."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import paddle
from paddle.autograd import PyLayer


def needs_grad(*inputs: paddle.Tensor) -> tuple[bool, ...]:
    """Return which inputs need a gradient. Call it in forward: tensors restored by recomputation have lost the flag."""
    return tuple(not tensor.stop_gradient for tensor in inputs)


def filter_gradients(
    gradients: Sequence[paddle.Tensor], needs_input_grad: Sequence[bool]
) -> tuple[paddle.Tensor | None, ...]:
    """Replace by None the gradients of inputs that do not need one, such as frozen weights; Paddle
    requires None there."""
    return tuple(gradient if want else None for gradient, want in zip(gradients, needs_input_grad, strict=True))


def disable_autocast() -> AbstractContextManager[Any]:
    """Return a context without autocast: a custom backward pass must see the same dtypes as its forward pass."""
    if paddle.base.framework._dygraph_tracer()._amp_level == paddle.base.core.AmpLevel.O0:
        return nullcontext()
    return paddle.amp.auto_cast(enable=False)


def autocast_operand(x: paddle.Tensor) -> paddle.Tensor:
    """Cast x to the autocast dtype, for custom products, which autocast does not reach."""
    tracer = paddle.base.framework._dygraph_tracer() if paddle.in_dynamic_mode() else None
    if tracer is None or tracer._amp_level == paddle.base.core.AmpLevel.O0:
        return x
    return x.astype(tracer._amp_dtype)


class _NoGradContext:
    """Replaces the context of a function whose backward pass never runs."""

    def save_for_backward(self, *tensors: paddle.Tensor) -> None:
        """Save nothing."""


def apply(function: type[PyLayer], *arguments: Any) -> Any:
    """Call `function.apply(...)`; while a program is recorded (`jit.save`), run its forward pass as plain operations.

    A saved model computes no gradients, and neither ONNX nor Paddle's optimisations of programs support a PyLayer.
    """
    if paddle.in_dynamic_mode():
        with disable_autocast():
            return function.apply(*arguments)
    # `to_static` wraps every PyLayer that it meets, including this argument.
    return getattr(function, "dyfunc_self", function).forward(_NoGradContext(), *arguments)

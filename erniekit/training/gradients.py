"""The global gradient norm and clipping by it, kept apart so that the norm is computed once and can be logged."""

from __future__ import annotations

from collections.abc import Iterable

import paddle
from paddle import Tensor, _C_ops


def fill_missing_gradients(parameters: Iterable[Tensor]) -> None:
    """Give every parameter that the step did not reach a zero gradient.

    Whether a gradient is absent or zero would otherwise depend on how the step was laid out (a kept buffer, a rank that
    did not use an expert), and AdamW updates the one case and skips the other.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = paddle.zeros_like(parameter)


@paddle.no_grad()
def global_norm(parameters: Iterable[Tensor]) -> Tensor:
    """The Euclidean norm of all gradients taken as one vector, a 0-d fp32 tensor.

    Uses the kernel behind Paddle's own ClipGradByGlobalNorm: `paddle.linalg.norm` adds fp32 squares one after the other
    on a CPU and is 3.5% too small for a tensor of 30 million elements (and 30 times slower).
    """
    squares = [_C_ops.squared_l2_norm(p.grad.astype("float32")).reshape([]) for p in parameters if p.grad is not None]
    return paddle.stack(squares).sum().sqrt()


@paddle.no_grad()
def clip_by_norm(parameters: Iterable[Tensor], norm: float, max_norm: float) -> None:
    """Scale all gradients in place so that their global norm, known to be `norm`, is at most `max_norm` (0: off)."""
    if max_norm <= 0 or norm <= max_norm:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.scale_(max_norm / norm)

"""Global gradient norm and clipping, separate so that the norm is computed once and can be logged; the loss scale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import paddle
from paddle import Tensor, _C_ops

from erniekit.model import native
from erniekit.model.products import scale_in_place

SQUARES_BLOCK = 65536  # gradients whose squares the native kernel adds to one partial sum


def fill_missing_gradients(parameters: Iterable[Tensor]) -> None:
    """Give a zero gradient to every parameter without one.

    Otherwise it would depend on the layout whether a gradient is absent or zero (a kept buffer, a rank that did not use
    an expert), and AdamW updates in one case and skips the other.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = paddle.zeros_like(parameter)


@paddle.no_grad()
def global_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm of all gradients as one vector, a 0-d tensor (fp64 for fp64 gradients, else fp32)."""
    return squared_norms([p.grad for p in parameters if p.grad is not None]).sum().sqrt()


def squared_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each of the n gradients, [n], in fp64 for fp64 and otherwise in fp32.

    Uses a native kernel, or that of Paddle's ClipGradByGlobalNorm: `paddle.linalg.norm` adds fp32 squares one after
    the other on a CPU and is 3.5% too small for a tensor of 30 million elements (and 30 times slower).
    """
    if gradients and (kernel := native.kernel("squared_norm", "lppp", *gradients)) is not None:
        sizes, totals = [native.size(gradient) for gradient in gradients], paddle.empty([len(gradients)], "float32")
        parts = paddle.empty([max(sizes) // SQUARES_BLOCK + 1], "float64")
        for index, (size, gradient) in enumerate(zip(sizes, gradients, strict=True)):
            total = totals.data_ptr() + index * totals.element_size()
            kernel(size, gradient.data_ptr(), parts.data_ptr(), total)
        return totals
    wide = [gradient if gradient.dtype == paddle.float64 else gradient.astype("float32") for gradient in gradients]
    return paddle.stack([_C_ops.squared_l2_norm(gradient).reshape([]) for gradient in wide])


def clip_by_norm(parameters: Iterable[Tensor], norm: float, max_norm: float) -> None:
    """Scale all gradients in place so that their global norm, given as `norm`, is at most `max_norm` (0: off)."""
    if 0 < max_norm < norm:
        scale_gradients(parameters, max_norm / norm)


@paddle.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply all gradients in place."""
    if factor == 1:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            scale_in_place(parameter.grad, factor)


# The dynamic loss scale of float16: backward runs on `scale x loss`, so that small gradients do not vanish.
#
# The smallest number of float16 is 6e-8; most gradients are below it. A scale of 2^k moves them up by k binary places
# (Micikevicius et al., 2018, arXiv:1710.03740). When a gradient overflows, the step is skipped and the scale halved;
# after `growth_interval` steps without an overflow it is doubled. Scales are powers of two if the first one is, so that
# scaling and its reversal are exact.

MAX_SCALE = 2.0**24
SKIPPED_STEPS = 20  # overflows in a row at a floor above 1 that end a run


@dataclass
class LossScale:
    """The state of the scale; part of every checkpoint.

    Attributes:
        scale: factor on the loss of the next step.
        finite_steps: steps without an overflow since the scale last changed.
        floor: an overflow does not reduce the scale below this.
        growth_interval: finite steps after which the scale is doubled.
        ceiling: the scale does not grow above this.
        overflows_at_floor: overflows in a row at the floor.
    """

    scale: float = 2.0**15
    finite_steps: int = 0
    floor: float = 1.0
    growth_interval: int = 2000
    ceiling: float = MAX_SCALE
    overflows_at_floor: int = 0

    def succeed(self) -> None:
        """Update after a step with finite gradients."""
        self.finite_steps += 1
        self.overflows_at_floor = 0
        if self.finite_steps >= self.growth_interval:
            self.scale, self.finite_steps = min(2 * self.scale, max(self.ceiling, self.scale)), 0

    def back_off(self) -> bool:
        """Reduce the scale after an overflow, or stay at the floor; return False if the run must end.

        At a scale of 1 it must, because the gradient itself is beyond float16. A higher floor may only be too high for
        some batches, so it must after `SKIPPED_STEPS` overflows in a row there.
        """
        if self.scale > self.floor:
            self.scale, self.finite_steps = max(self.scale / 2, self.floor), 0
            return True
        self.overflows_at_floor += 1
        goes_on = self.floor > 1 and self.overflows_at_floor < SKIPPED_STEPS
        if goes_on:
            self.finite_steps = 0
        return goes_on

    def within(self, floor: float, ceiling: float) -> LossScale:
        """Return this state with the bounds of another run, and the scale inside them."""
        return replace(self, scale=min(max(self.scale, floor), ceiling), floor=floor, ceiling=ceiling)

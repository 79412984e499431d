"""SwiGLU (Shazeer, 2020, arXiv:2002.05202) as one autograd node."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from erniekit.model.autograd import apply, filter_gradients, needs_grad
from erniekit.model.kernels import fused_kernels, fused_swiglu


def swiglu(gate: paddle.Tensor, up: paddle.Tensor) -> paddle.Tensor:
    """silu(gate) * up, elementwise, for two tensors of one shape."""
    return fused_swiglu(gate, up) if fused_kernels().swiglu else apply(_SwiGLU, gate, up)


class _SwiGLU(PyLayer):
    """With s = sigmoid(gate): d up = g s gate,  d gate = g up s (1 + gate (1 - s)).

    The sigmoid is computed again in backward rather than kept: it is cheap beside the products around it.
    """

    @staticmethod
    def forward(ctx, gate, up):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate, up)
        ctx.needs_input_grad = needs_grad(gate, up)
        return F.sigmoid(gate).multiply_(gate).multiply_(up)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        gate, up = ctx.saved_tensor()
        sigmoid = F.sigmoid(gate)
        silu = gate * sigmoid
        grad_up = grad * silu
        # s (1 + gate (1 - s)) = s + silu - s silu
        slope = (silu - sigmoid * silu).add_(sigmoid)
        return filter_gradients((slope.multiply_(up).multiply_(grad), grad_up), ctx.needs_input_grad)

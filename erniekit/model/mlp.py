"""The gated feed-forward network of every family (Shazeer, 2020, arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.autograd import PyLayer

from erniekit.model import native
from erniekit.model.architectures.model_config import ModelConfig
from erniekit.model.autograd import apply, filter_gradients, needs_grad
from erniekit.model.cpu_gradients import gelu
from erniekit.model.kernels import fused_kernels, fused_swiglu
from erniekit.model.linear import Linear
from erniekit.model.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel


def swiglu(gate: paddle.Tensor, up: paddle.Tensor) -> paddle.Tensor:
    """Compute silu(gate) * up, elementwise, for two tensors of the same shape, as one autograd node."""
    if fused_kernels().swiglu:
        return fused_swiglu(gate, up)
    joined = _native("swiglu", gate, up)
    return apply(_SwiGLU, gate, up) if joined is None else joined


class _SwiGLU(PyLayer):
    """With s = sigmoid(gate): d up = g s gate,  d gate = g up s (1 + gate (1 - s)).

    The sigmoid is recomputed in backward and not kept: it is cheap compared with the matrix products around it.
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


def geglu_tanh(gate: paddle.Tensor, up: paddle.Tensor) -> paddle.Tensor:
    """Compute gelu(gate) * up with the tanh approximation of GELU (Hendrycks and Gimpel, 2016, arXiv:1606.08415)."""
    joined = _native("geglu_tanh", gate, up)
    return F.gelu(gate, approximate=True) * up if joined is None else joined


def geglu(gate: paddle.Tensor, up: paddle.Tensor) -> paddle.Tensor:
    """Compute gelu(gate) * up with the exact GELU, gate Phi(gate), as VALL-E's decoder; no kernel of ours does."""
    return gelu(gate) * up


def clamped_swiglu(gate: paddle.Tensor, up: paddle.Tensor) -> paddle.Tensor:
    """Compute gate sigmoid(1.702 gate) (up + 1), with gate at most 7 and up in [-7, 7], as in GPT-OSS."""
    joined = _native("clamped_swiglu", gate, up)
    if joined is not None:
        return joined
    gate, up = gate.clip(max=7.0), up.clip(min=-7.0, max=7.0)
    return gate * F.sigmoid(1.702 * gate) * (up + 1.0)


def _native(name: str, gate: paddle.Tensor, up: paddle.Tensor) -> paddle.Tensor | None:
    """Compute the activation of this name with kernels of our own; None where Paddle's operators have to run."""
    if native.kernel("activation_forward", "llppp", gate, up) is None or gate.shape != up.shape:
        return None
    return apply(_NativeActivation, gate, up, ACTIVATION_KINDS[name])


class _NativeActivation(PyLayer):
    """One pass over memory in either direction (`native/source/activation.c`); backward keeps gate and up."""

    @staticmethod
    def forward(ctx, gate, up, kind):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate, up)
        ctx.kind, ctx.needs_input_grad = kind, needs_grad(gate, up)
        joined = paddle.empty_like(gate)
        compute = native.kernel("activation_forward", "llppp", gate, up)
        compute(kind, native.size(gate), *native.pointers(gate, up, joined))
        return joined

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        tensors = (*ctx.saved_tensor(), grad.contiguous())
        gradients = [paddle.empty_like(grad), paddle.empty_like(grad)]
        compute = native.kernel("activation_backward", "llppppp", *tensors)
        compute(ctx.kind, native.size(grad), *native.pointers(*tensors, *gradients))
        return filter_gradients(gradients, ctx.needs_input_grad)


# What joins gate and up, by `Architecture.activation`.
ACTIVATIONS: dict[str, Callable[[paddle.Tensor, paddle.Tensor], paddle.Tensor]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "geglu_tanh": geglu_tanh,
    "clamped_swiglu": clamped_swiglu,
}
# The numbers in `Activation` of native/source/activation.h of those that it computes.
ACTIVATION_KINDS = {"swiglu": 0, "geglu_tanh": 1, "clamped_swiglu": 2}


class MLP(nn.Layer):
    """down(activation(gate x, up x)) with `inner_size` channels, which the ranks of `tp` shard.

    Of a fused `gate_up_proj`, gates first, every rank has the whole and takes its channels of the output, so that
    files and adapters keep their order.
    """

    def __init__(self, config: ModelConfig, inner_size: int, tp: TensorParallel = NO_TENSOR_PARALLEL) -> None:
        super().__init__()
        self.tp, self.inner_size = tp, tp.local_size(inner_size)
        self.activation, self.fused = ACTIVATIONS[config.architecture.activation], config.architecture.fused_gate_up

        def linear(name: str, inputs: int, outputs: int, shard_along: Literal["inputs", "outputs"]) -> Linear:
            return Linear(inputs, outputs, config.has_bias(name), tp=tp, shard_along=shard_along)

        if self.fused:
            self.gate_up_proj = Linear(config.hidden_size, 2 * inner_size, config.has_bias("gate_up_proj"))
        else:
            self.gate_proj = linear("gate_proj", config.hidden_size, inner_size, "outputs")
            self.up_proj = linear("up_proj", config.hidden_size, inner_size, "outputs")
        self.down_proj = linear("down_proj", inner_size, config.hidden_size, "inputs")

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.tp.copy_to_tp(x)
        gate, up = self._split(self.gate_up_proj(x)) if self.fused else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(self.activation(gate, up))

    def _split(self, gate_up: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        gate, up = gate_up.chunk(2, axis=-1)
        if self.tp.size == 1:
            return gate, up
        own = slice(self.tp.rank * self.inner_size, (self.tp.rank + 1) * self.inner_size)
        return gate[..., own], up[..., own]

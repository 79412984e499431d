"""Biases, GELU and LayerNorm with gradients of our own on a CPU, where Paddle's take several times as long.

Forward gives Paddle's values, bit for bit but for GELU, which agrees to rounding. Column and row sums are products with
a vector, as in `norm.py`. On other devices, and while a program is recorded, Paddle's functions run.
"""

from __future__ import annotations

import math

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.autograd import PyLayer

from erniekit.model import bf16, kernels
from erniekit.model.autograd import filter_gradients, needs_grad
from erniekit.model.norm import expand_like


def linear(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None) -> paddle.Tensor:
    """Compute x W + b."""
    if bf16.computes(bf16.LINEAR, x, weight):
        product = bf16.linear(x, weight)
        return product if bias is None else add_bias(product, bias)
    if bias is None or kernels.fused_kernels().linear or not _needs_own(bias):
        return kernels.linear(x, weight, bias)
    return _AddBias.apply(F.linear(x, weight), bias)


def add_bias(x: paddle.Tensor, bias: paddle.Tensor) -> paddle.Tensor:
    """Compute x + b for x [..., H] and b [H]."""
    return _AddBias.apply(x, bias) if _needs_own(bias) else x + bias


def gelu(x: paddle.Tensor) -> paddle.Tensor:
    """Compute x times the normal distribution's probability of less than x (Hendrycks and Gimpel, 2016,
    arXiv:1606.08415)."""
    if _needs_own(x):
        return _GELU.apply(x)
    return _probability(x).multiply_(x) if _is_on_cpu() else F.gelu(x)  # the same values with a gradient and without


class LayerNorm(nn.LayerNorm):
    """LayerNorm (Ba et al., 2016, arXiv:1607.06450) over the last axis, with a weight and a bias."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if not _needs_own(x, self.weight, self.bias):
            return super().forward(x)
        return _LayerNormFunction.apply(x, self.weight, self.bias, self._epsilon)


def _needs_own(*inputs: paddle.Tensor) -> bool:
    return _is_on_cpu() and paddle.is_grad_enabled() and any(needs_grad(*inputs))


def _is_on_cpu() -> bool:
    return paddle.in_dynamic_mode() and paddle.get_device() == "cpu"


def _column_sums(rows: paddle.Tensor) -> paddle.Tensor:
    return paddle.matmul(paddle.ones([1, rows.shape[0]], rows.dtype), rows).reshape([-1])


class _AddBias(PyLayer):
    @staticmethod
    def forward(ctx, x, bias):  # type: ignore[no-untyped-def]
        ctx.needs_input_grad = needs_grad(x, bias)
        return x + expand_like(bias, x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        grad_bias = _column_sums(grad.reshape([-1, grad.shape[-1]]))
        return filter_gradients((grad, grad_bias), ctx.needs_input_grad)


class _GELU(PyLayer):
    """With P the distribution and p its density, y = x P(x) and dy/dx = P(x) + x p(x), which forward keeps in the place
    of x."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        probability = _probability(x)
        density = paddle.square(x).scale_(-0.5, bias=-0.5 * math.log(2 * math.pi)).exp_()
        ctx.save_for_backward(density.multiply_(x).add_(probability))
        return probability.multiply_(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (slope,) = ctx.saved_tensor()
        return grad * slope


def _probability(x: paddle.Tensor) -> paddle.Tensor:
    """Return the normal distribution's probability of less than x."""
    return paddle.erf(x * math.sqrt(0.5)).scale_(0.5, bias=0.5)


class _LayerNormFunction(PyLayer):
    """With r = 1 / sqrt(variance + epsilon), n = r (x - mean), y = w n + b and g the gradient of y:
    dx = r (w g - mean(w g) - n mean(w g n)),  dw = sum over rows of g n,  db = sum over rows of g."""

    @staticmethod
    def forward(ctx, x, weight, bias, epsilon):  # type: ignore[no-untyped-def]
        ctx.needs_input_grad, ctx.epsilon = needs_grad(x, weight, bias), epsilon
        ctx.save_for_backward(x, weight)
        return F.layer_norm(x, [x.shape[-1]], weight, bias, epsilon)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensor()
        size = x.shape[-1]
        rows, grad_rows = x.reshape([-1, size]), grad.reshape([-1, size])
        mean = paddle.full([size, 1], 1.0 / size, rows.dtype)
        centred = rows - expand_like(paddle.matmul(rows, mean), rows)
        inverse = paddle.rsqrt(paddle.matmul(paddle.square(centred), mean) + ctx.epsilon)
        normed = centred.multiply_(expand_like(inverse, rows))
        product = grad_rows * normed
        weighted_mean = (weight / size).reshape([size, 1])
        grad_weight, grad_bias = _column_sums(product), _column_sums(grad_rows)
        grad_x = grad_rows * expand_like(weight, rows)
        along = paddle.matmul(product, weighted_mean)
        grad_x.subtract_(expand_like(paddle.matmul(grad_rows, weighted_mean), rows))
        grad_x.subtract_(normed.multiply_(expand_like(along, rows))).multiply_(expand_like(inverse, rows))
        return filter_gradients((grad_x.reshape(x.shape), grad_weight, grad_bias), ctx.needs_input_grad)

"""RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467) as one autograd node, and a fast broadcast."""

from __future__ import annotations

from collections.abc import Callable

import paddle
from paddle import nn
from paddle.autograd import PyLayer

from erniekit.model import native
from erniekit.model.autograd import apply, disable_autocast
from erniekit.model.kernels import fused_kernels, fused_rms_norm
from erniekit.model.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel

KERNEL = ("rms_norm", "llppfpp")
BLOCK_ROWS, MOST_BLOCKS = 32, 64  # of rows whose part of a weight's gradient a native kernel sums by itself
Norm = Callable[[paddle.Tensor, paddle.Tensor, float], paddle.Tensor]  # of x, weight and epsilon


def expand_like(x: paddle.Tensor, like: paddle.Tensor) -> paddle.Tensor:
    """Expand x to the shape of `like`, before an elementwise operation with it.

    On a CPU Paddle's broadcasting operations take 3 to 7 times as long as those of two tensors of the same shape,
    including the copy. The result is the same, bit for bit. A saved program leaves the broadcast to the operation,
    because paddle2onnx writes the shape of `like` as it was recorded, with -1 for a varying length.
    """
    return x.expand_as(like) if paddle.in_dynamic_mode() else x


class RMSNorm(nn.Layer):
    """y = scale * (offset + weight) * x / sqrt(mean(x^2) + epsilon), over the last axis.

    Args:
        offset: of the weights that files hold, as in Gemma.
        tp: the ranks that divide the axis, where they do.
    """

    def __init__(
        self,
        size: int,
        epsilon: float,
        *,
        offset: float = 0.0,
        scale: float = 1.0,
        tp: TensorParallel = NO_TENSOR_PARALLEL,
    ) -> None:
        super().__init__()
        self.epsilon, self.offset, self.scale, self.tp = epsilon, offset, scale, tp
        initial = nn.initializer.Constant(1.0 - offset)
        self.weight = self.create_parameter([tp.local_size(size)], default_initializer=initial)

    def forward(self, x: paddle.Tensor, compute: Norm | None = None) -> paddle.Tensor:
        """Normalise x.

        Args:
            compute: what computes the norm, together with what follows it; default `rms_norm`. Not where ranks divide
                the axis.
        """
        weight = self.weight if self.offset == 0.0 else self.weight + self.offset
        weight = weight if self.scale == 1.0 else weight * self.scale
        if self.tp.size > 1:
            return sharded_rms_norm(x, weight, self.epsilon, self.tp)
        if compute is not None:
            return compute(x, weight, self.epsilon)
        return rms_norm(x, weight, self.epsilon)


def sharded_rms_norm(x: paddle.Tensor, weight: paddle.Tensor, epsilon: float, tp: TensorParallel) -> paddle.Tensor:
    """Compute RMSNorm over an axis that ranks divide, from this rank's x [..., H / n] and weight [H / n]."""
    dtype, x = x.dtype, x.astype(weight.dtype)
    mean = tp.sum_shards((x * x).mean(-1, keepdim=True)) / tp.size
    return (x * paddle.rsqrt(mean + epsilon) * weight).astype(dtype)


def rms_norm(x: paddle.Tensor, weight: paddle.Tensor, epsilon: float) -> paddle.Tensor:
    """Compute RMSNorm of x [..., H] with weight [H]; backward keeps x and one number per row."""
    if x.dtype != weight.dtype:
        x = x.astype(weight.dtype)  # 16-bit states; norm weights are float32
    if fused_kernels().rms_norm:
        with disable_autocast():
            return fused_rms_norm(x, weight, epsilon)
    if native.kernel(*KERNEL, weight) is not None:
        return apply(_NativeRMSNorm, x, weight, epsilon)
    return apply(_RMSNormFunction, x, weight, epsilon)


class _RMSNormFunction(PyLayer):
    """With r = 1 / sqrt(mean(x^2) + epsilon) and g the gradient of y = w x r:
    dx = r w g - x r^3 mean(w g x),  dw = sum over rows of r g x.

    Row and column sums are products with a vector: Paddle's reductions on a CPU are several times slower.
    """

    @staticmethod
    def forward(ctx, x, weight, epsilon):  # type: ignore[no-untyped-def]
        rows = x.reshape([-1, x.shape[-1]])
        ctx.trains_weight = not weight.stop_gradient  # a tensor restored by recomputation has lost the flag
        # A tensor, because Paddle's optimisation of saved programs drops the addition of a number below 1e-5.
        inverse_rms = paddle.rsqrt(_row_mean(rows * rows) + paddle.full([1], epsilon, rows.dtype))
        ctx.save_for_backward(rows, weight, inverse_rms)
        return (rows * expand_like(inverse_rms, rows)).multiply_(expand_like(weight, rows)).reshape(x.shape)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        rows, weight, inverse_rms = ctx.saved_tensor()
        grad_rows = grad.reshape(rows.shape)
        grad_weight = None
        if ctx.trains_weight:
            grad_weight = paddle.matmul(inverse_rms, grad_rows * rows, transpose_x=True).reshape(weight.shape)
        scaled = grad_rows * expand_like(weight, rows)
        projection = _row_mean(scaled * rows) * inverse_rms.pow(3)
        grad_x = scaled.multiply_(expand_like(inverse_rms, rows)).subtract_(rows * expand_like(projection, rows))
        return grad_x.reshape(grad.shape), grad_weight


class _NativeRMSNorm(PyLayer):
    """`_RMSNormFunction` in one pass of a native kernel forward and one backward.

    A class of its own: the forward pass of the other is also recorded as a program, without any choice in it.
    """

    @staticmethod
    def forward(ctx, x, weight, epsilon):  # type: ignore[no-untyped-def]
        ctx.trains_weight = not weight.stop_gradient
        rows = native.contiguous(x).reshape([-1, x.shape[-1]])
        y, inverse_rms = paddle.empty(x.shape, x.dtype), paddle.empty([rows.shape[0], 1], x.dtype)
        inputs, outputs = native.pointers(rows, weight), native.pointers(y, inverse_rms)
        native.kernel(*KERNEL)(*rows.shape, *inputs, epsilon, *outputs)
        ctx.save_for_backward(rows, weight, inverse_rms)
        return y

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        rows, weight, inverse_rms = ctx.saved_tensor()
        grad_rows = native.contiguous(grad).reshape(rows.shape)
        blocks, partial = weight_gradient_parts(rows.shape[0], weight if ctx.trains_weight else None)
        grad_x = paddle.empty(grad.shape, grad.dtype)
        kernel = native.kernel("rms_norm_backward", "lllpppppp")
        kernel(*rows.shape, blocks, *native.pointers(rows, weight, inverse_rms, grad_rows, grad_x, partial))
        return grad_x, None if partial is None else partial[0]


def weight_gradient_parts(rows: int, weight: paddle.Tensor | None) -> tuple[int, paddle.Tensor | None]:
    """Return in how many parts a native kernel sums a weight's gradient over rows, and zeros [parts, H] for them, of
    which the first becomes the gradient; None where the weight has none."""
    parts = max(1, min(rows // BLOCK_ROWS, MOST_BLOCKS))
    return parts, None if weight is None else paddle.zeros([parts, weight.shape[0]], weight.dtype)


def _row_mean(rows: paddle.Tensor) -> paddle.Tensor:
    size = rows.shape[-1]
    return paddle.matmul(rows, paddle.full([size, 1], 1.0 / size, dtype=rows.dtype))

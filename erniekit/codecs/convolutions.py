"""Convolutions over time, as neural codecs put them together: for inference, in float32, with folded weights.

Sound and states are [1, channels, time]. Published codecs differ in how a convolution is padded: DAC by a fixed number
of zeros on both sides; EnCodec and Mimi so that every `stride` samples, begun or complete, give one frame (`fill`),
all of it on the left where they are causal.

On a CPU Paddle computes a long convolution in half the time if it is cut into tiles whose unfolded input fits the
cache, and adds or multiplies a value per channel ten times as slowly as NumPy does, which works on the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

UNFOLDED_BYTES = 8 << 20  # of the tiles that a convolution without stride is cut into


@dataclass(frozen=True)
class Conv1D:
    """A convolution [1, in, T] -> [1, out, T'].

    Attributes:
        weight: [out, in / groups, kernel].
        bias: [out], or None.
        left, right: samples put before and after.
        fill: samples are put after the last one, beyond `right`, until T' = ceil(T / stride); `left` + `right` must be
            `span` - `stride`.
        mode: what is put there: "constant" (zeros), "reflect" or "replicate".
    """

    weight: Tensor
    bias: Tensor | None
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    left: int = 0
    right: int = 0
    fill: bool = False
    mode: str = "constant"

    @property
    def span(self) -> int:
        """Samples from the first that a frame depends on to the last."""
        return (self.weight.shape[2] - 1) * self.dilation + 1

    def __call__(self, x: Tensor) -> Tensor:
        assert not self.fill or self.left + self.right == self.span - self.stride
        right = self.right + (-x.shape[2] % self.stride if self.fill else 0)
        return self._convolve(pad_time(x, self.left, right, self.mode))

    def _convolve(self, x: Tensor) -> Tensor:
        frames = x.shape[2] - self.span + 1
        tile = max(1024, UNFOLDED_BYTES // (4 * x.shape[1] * self.weight.shape[2]))
        if self.stride > 1 or self.span == 1 or frames <= tile or not x.place.is_cpu_place():
            return self._at_once(x)
        starts = range(0, frames, tile)
        return paddle.concat([self._at_once(x[:, :, start : start + tile + self.span - 1]) for start in starts], 2)

    def _at_once(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


@dataclass(frozen=True)
class ConvTranspose1D:
    """A transposed convolution [1, in, T] -> [1, out, (T - 1) * stride + kernel - left - right].

    Attributes:
        weight: [in, out / groups, kernel].
        bias: [out], or None.
        left, right: samples cut off at the beginning and the end.
    """

    weight: Tensor
    bias: Tensor | None
    stride: int = 1
    groups: int = 1
    left: int = 0
    right: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        y = F.conv1d_transpose(x, self.weight, self.bias, self.stride, groups=self.groups)
        return y[:, :, self.left : y.shape[2] - self.right]


def pad_time(x: Tensor, left: int, right: int, mode: str = "constant") -> Tensor:
    """Return x [1, channels, T] with `left` and `right` more samples.

    Reflection needs more samples than it adds on either side. A shorter x is first followed by zeros, and as many
    samples of the result are cut off again, as EnCodec does it.
    """
    length = x.shape[2]
    if mode == "reflect" and length <= max(left, right):
        zeros = max(left, right) - length + 1
        return pad_time(pad_time(x, 0, zeros), left, right, mode)[:, :, : left + length + right]
    pieces = [x]
    if left:
        pieces.insert(0, _padding(x, slice(1, left + 1), slice(0, 1), left, mode))
    if right:
        pieces.append(_padding(x, slice(length - 1 - right, length - 1), slice(length - 1, length), right, mode))
    return pieces[0] if len(pieces) == 1 else paddle.concat(pieces, 2)


def _padding(x: Tensor, mirrored: slice, repeated: slice, count: int, mode: str) -> Tensor:
    """Return `count` samples that stand before or after x; Paddle's own `pad` takes ten times as long."""
    if mode == "reflect":
        return x[:, :, mirrored].flip(2)
    if mode == "replicate":
        return x[:, :, repeated].expand([-1, -1, count])
    assert mode == "constant", mode
    return paddle.zeros([*x.shape[:2], count], x.dtype)


def snake(x: Tensor, alpha: Tensor) -> Tensor:
    """Return x + sin(alpha x)^2 / (alpha + 1e-9); the activation of DAC (https://arxiv.org/abs/2006.08195).

    Args:
        x: [1, channels, T].
        alpha: [1, channels, 1].
    """

    def compute(values: Any, alpha: Any) -> Any:
        y = np.multiply(alpha, values)
        np.sin(y, out=y)
        y *= y
        y *= np.reciprocal(alpha + np.float32(1e-9))
        y += values
        return y

    if not x.place.is_cpu_place():
        return x + paddle.sin(alpha * x).square() / (alpha + 1e-9)
    return in_numpy(compute, x, alpha)


def in_numpy(compute: Callable[..., Any], *tensors: Tensor) -> Tensor:
    """Return what `compute` makes of tensors on a CPU, which it gets as read-only arrays; nothing is copied."""
    result = compute(*(np.from_dlpack(tensor) for tensor in tensors))
    return paddle.utils.dlpack.from_dlpack(result)

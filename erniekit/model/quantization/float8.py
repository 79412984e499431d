"""8-bit floats with one scale per tensor (Micikevicius et al., 2022, arXiv:2209.05433).

A value x is stored as the code nearest to x / scale, ties to even, with scale = largest |x| / largest code, so that the
largest value gets the largest code. e4m3 has 3 fraction bits and reaches 448, e5m2 has 2 and reaches 57,344.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import paddle

from erniekit.model.quantization.hadamard import hadamard

FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
_LEAST_SCALE = 2.0**-126  # the smallest normal number of float32; codes below it would be subnormal
DTYPES = {"e4m3": paddle.float8_e4m3fn, "e5m2": paddle.float8_e5m2}


class Float8(NamedTuple):
    """A tensor in 8-bit floats; its values are codes * scale.

    Attributes:
        codes: in one of Paddle's FP8 dtypes.
        scale: 0-d float32.
    """

    codes: paddle.Tensor
    scale: paddle.Tensor

    def decoded(self, dtype: paddle.dtype = paddle.float32) -> paddle.Tensor:
        """Return the values; the scale is not rounded to 16 bits."""
        return (self.codes.astype("float32") * self.scale).astype(dtype)


def encode(x: paddle.Tensor, form: str, largest: paddle.Tensor) -> Float8:
    """Round x to "e4m3" or "e5m2". NaN stays NaN, and all values become NaN if `largest` is not finite.

    Args:
        largest: 0-d float32, the absolute value that gets the largest code; larger values saturate.
    """
    limit = FP8_MAX[form]
    scale = paddle.where(largest <= 0, paddle.ones_like(largest), (largest / limit).clip(min=_LEAST_SCALE))
    # Paddle's cast does not saturate everywhere: on a CPU 465 becomes NaN, and NaN becomes the largest code, whose bits
    # are those of NaN minus 1.
    codes = (x.astype("float32") / scale).clip(-limit, limit).astype(DTYPES[form])
    return Float8((codes.view("uint8") | paddle.isnan(x).astype("uint8")).view(DTYPES[form]), scale)


def amax(x: paddle.Tensor) -> paddle.Tensor:
    """Return the largest absolute value, 0-d float32; 0 for an empty tensor."""
    return x.abs().max().astype("float32") if x.size else paddle.zeros([])


def hadamard_rotate(x: paddle.Tensor, block: int) -> paddle.Tensor:
    """Multiply every `block` values of the last axis by a Hadamard matrix, which spreads outliers over them.

    A second rotation undoes the first. A block of 0 leaves x unchanged.
    """
    if not block or not x.size:
        return x
    return paddle.matmul(x.reshape([-1, block]), _matrix(block, x.dtype, paddle.get_device())).reshape(x.shape)


@cache
def _matrix(block: int, dtype: paddle.dtype, device: str) -> paddle.Tensor:
    return paddle.to_tensor(hadamard(block), place=device).astype(dtype)

"""8-bit floats with one scale for a tensor (Micikevicius et al., 2022, arXiv:2209.05433).

A value x is stored as the code nearest to x / scale, ties to even, with scale = largest |x| / largest code, so that the
largest value meets the largest code. e4m3 has 3 bits of fraction and reaches 448, e5m2 has 2 and reaches 57,344.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import paddle

from erniekit.model.quantization.hadamard import hadamard

FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
_LEAST_SCALE = 2.0**-126  # the least that is precise in float32; codes of what is smaller are subnormal ones
DTYPES = {"e4m3": paddle.float8_e4m3fn, "e5m2": paddle.float8_e5m2}


class Float8(NamedTuple):
    """A tensor in 8-bit floats: it stands for codes * scale.

    Attributes:
        codes: of one of Paddle's FP8 types.
        scale: 0-d float32.
    """

    codes: paddle.Tensor
    scale: paddle.Tensor

    def decoded(self, dtype: paddle.dtype = paddle.float32) -> paddle.Tensor:
        """What it stands for; the scale of a whole tensor is not rounded to 16 bits."""
        return (self.codes.astype("float32") * self.scale).astype(dtype)


def encode(x: paddle.Tensor, form: str, largest: paddle.Tensor) -> Float8:
    """Round x to "e4m3" or "e5m2"; what is not a number stays so, and where `largest` is not finite nothing is.

    Args:
        largest: 0-d float32, the absolute value that meets the largest code; what is beyond it becomes as large as it.
    """
    limit = FP8_MAX[form]
    scale = paddle.where(largest <= 0, paddle.ones_like(largest), (largest / limit).clip(min=_LEAST_SCALE))
    # Paddle's cast does not saturate everywhere: on a CPU 465 becomes not-a-number, and not-a-number the largest code,
    # whose bits are 1 less than its own
    codes = (x.astype("float32") / scale).clip(-limit, limit).astype(DTYPES[form])
    return Float8((codes.view("uint8") | paddle.isnan(x).astype("uint8")).view(DTYPES[form]), scale)


def amax(x: paddle.Tensor) -> paddle.Tensor:
    """The largest absolute value, 0-d float32; 0 of an empty tensor."""
    return x.abs().max().astype("float32") if x.size else paddle.zeros([])


def hadamard_rotate(x: paddle.Tensor, block: int) -> paddle.Tensor:
    """Multiply every `block` values of the last axis by a Hadamard matrix, which spreads outliers over them.

    Doing it again undoes it. 0 leaves x as it is.
    """
    if not block or not x.size:
        return x
    return paddle.matmul(x.reshape([-1, block]), _matrix(block, x.dtype, paddle.get_device())).reshape(x.shape)


@cache
def _matrix(block: int, dtype: paddle.dtype, device: str) -> paddle.Tensor:
    return paddle.to_tensor(hadamard(block), place=device).astype(dtype)

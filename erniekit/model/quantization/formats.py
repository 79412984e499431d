"""Formats of quantized weights: 8- and 4-bit symmetric integers, QLoRA's 4-bit normal float, and 8-bit floats.

A weight is [out, in], as Hugging Face stores it. Adjacent inputs of one output share a scale:

    int8  one scale for each output; code c of -127..127 means c * scale
    int4  groups of 64 inputs;       code c of 1..15 means (c - 8) * scale
        nf4   groups of 64 inputs;       code c of 0..15 means level[c] * scale (Dettmers et al., 2023,
    arXiv:2305.14314, appendix E; the level of a code is a quantile of the normal distribution)

Two 4-bit codes share a byte, with that of the even input in its lower half.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import paddle

from erniekit.model.quantization.hadamard import hadamard

GROUP = 64  # inputs per scale of 4-bit codes, or the largest power of two below it that divides their number

NORMAL_FLOAT = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class Format:
    """The meaning of a weight's codes.

    Attributes:
        levels: value of each 4-bit code, in units of the scale; empty: codes are 8-bit integers.
        largest: the largest level.
    """

    name: str
    levels: tuple[float, ...]
    largest: float

    @property
    def bits(self) -> int:
        return 4 if self.levels else 8

    def group(self, inputs: int) -> int:
        """Return how many inputs share a scale in a weight with this number of inputs."""
        return math.gcd(GROUP, inputs) if self.levels else inputs

    def shapes(self, outputs: int, inputs: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of the codes and of the scales of a weight."""
        return (outputs, inputs * self.bits // 8), (outputs, inputs // self.group(inputs))

    def divides(self, inputs: int, parts: int) -> bool:
        """Return whether the inputs can be split into equal parts that share no scale with each other."""
        return inputs % parts == 0 and (not self.levels or (inputs // parts) % self.group(inputs) == 0)

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Return the size in bytes of a weight: its codes, and its scales in float32."""
        codes, scales = self.shapes(outputs, inputs)
        return math.prod(codes) + 4 * math.prod(scales)


INT8 = Format("int8", (), 127.0)
INT4 = Format("int4", tuple(float(code - 8) for code in range(16)), 7.0)
NF4 = Format("nf4", NORMAL_FLOAT, 1.0)


# 8-bit floats with one scale per tensor (Micikevicius et al., 2022, arXiv:2209.05433). A value x is stored as the code
# nearest to x / scale, ties to even, with scale = largest |x| / largest code, so that the largest value gets the
# largest code. e4m3 has 3 fraction bits and reaches 448, e5m2 has 2 and reaches 57,344.

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

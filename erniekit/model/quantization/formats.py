"""Weights in 8 or 4 bits: symmetric integers, and the 4-bit normal float of QLoRA. Needs neither Paddle nor NumPy.

A weight is [out, in], as Hugging Face stores it. Inputs of one output that lie side by side share a scale:

    int8  one scale for each output; code c of -127..127 stands for c * scale
    int4  groups of 64 inputs;       code c of 1..15 stands for (c - 8) * scale
    nf4   groups of 64 inputs;       code c of 0..15 stands for level[c] * scale (Dettmers et al., 2023,
          arXiv:2305.14314, appendix E; the level of a code is a quantile of the normal distribution)

Two 4-bit codes share a byte, that of the even input in its lower half.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GROUP = 64  # inputs that share a scale of 4-bit codes, or the largest power of two below it that divides them all

NORMAL_FLOAT = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class Format:
    """What the codes of a weight mean.

    Attributes:
        levels: of 4-bit codes, what each stands for, in units of the scale; none: a code is an 8-bit integer.
        largest: the largest level.
    """

    name: str
    levels: tuple[float, ...]
    largest: float

    @property
    def bits(self) -> int:
        return 4 if self.levels else 8

    def group(self, inputs: int) -> int:
        """How many inputs share a scale, in a weight with so many."""
        return math.gcd(GROUP, inputs) if self.levels else inputs

    def shapes(self, outputs: int, inputs: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of the codes and of the scales of a weight."""
        return (outputs, inputs * self.bits // 8), (outputs, inputs // self.group(inputs))

    def divides(self, inputs: int, parts: int) -> bool:
        """Whether the inputs of a weight can be divided into equal parts that share no scale with another."""
        return inputs % parts == 0 and (not self.levels or (inputs // parts) % self.group(inputs) == 0)

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Of a weight: its codes, and its scales in float32."""
        codes, scales = self.shapes(outputs, inputs)
        return math.prod(codes) + 4 * math.prod(scales)


INT8 = Format("int8", (), 127.0)
INT4 = Format("int4", tuple(float(code - 8) for code in range(16)), 7.0)
NF4 = Format("nf4", NORMAL_FLOAT, 1.0)

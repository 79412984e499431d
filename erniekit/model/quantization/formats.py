"""Formats of quantized weights: 8- and 4-bit symmetric integers, QLoRA's 4-bit normal float. Needs no Paddle or NumPy.

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

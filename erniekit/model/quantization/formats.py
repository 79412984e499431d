"""Weights in 8 or 4 bits: symmetric integers, and the 4-bit normal float of QLoRA. NumPy only.

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
from typing import NamedTuple

import numpy as np

from erniekit.errors import ModelFileError

GROUP = 64  # inputs that share a scale of 4-bit codes, or the largest power of two below it that divides them all
_BLOCK = 1 << 20  # values that are quantised at once, for that takes room beside them

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


INT8 = Format("int8", (), 127.0)
INT4 = Format("int4", tuple(float(code - 8) for code in range(16)), 7.0)
NF4 = Format("nf4", NORMAL_FLOAT, 1.0)


class Packed(NamedTuple):
    """A weight in few bits.

    Attributes:
        codes: int8 [out, in], or two to a byte, uint8 [out, in / 2].
        scales: float32 [out, in / group].
    """

    codes: np.ndarray
    scales: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def quantize(values: np.ndarray, form: Format, name: str = "a weight") -> Packed:
    """The nearest codes of a weight [out, in]; the largest value of each group is kept as it is.

    Args:
        name: of the weight, for the error.

    Raises:
        ModelFileError: a value is not finite, or the inputs of 4-bit codes are odd in number.
    """
    outputs, inputs = values.shape
    if form.bits == 4 and inputs % 2:
        raise ModelFileError(f"{name}: {inputs} inputs cannot be stored two to a byte; write weight_only_int8")
    code_shape, scale_shape = form.shapes(outputs, inputs)
    packed = Packed(np.empty(code_shape, np.uint8 if form.levels else np.int8), np.empty(scale_shape, np.float32))
    step = max(1, _BLOCK // inputs)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        packed.codes[rows], packed.scales[rows] = _quantize_rows(np.asarray(values[rows], np.float32), form)
    if not np.isfinite(packed.scales).all():
        raise ModelFileError(f"{name}: holds values that are not finite, so the weights are damaged")
    return packed


def _quantize_rows(values: np.ndarray, form: Format) -> tuple[np.ndarray, np.ndarray]:
    rows, inputs = values.shape
    grouped = values.reshape(rows, -1, form.group(inputs))
    scales = np.abs(grouped).max(axis=2) / np.float32(form.largest)
    with np.errstate(invalid="ignore"):  # of values that are not finite, which are refused
        units = (grouped / np.where(scales > 0, scales, np.float32(1))[:, :, None]).reshape(rows, inputs)
        if not form.levels:
            return np.rint(units).astype(np.int8), scales
        levels = np.asarray(form.levels, np.float32)
        codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, units).astype(np.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales


def dequantize(packed: Packed, form: Format) -> np.ndarray:
    """The values [out, in] that the codes stand for, float32."""
    units = byte_levels(form)[packed.codes] if form.levels else packed.codes.astype(np.float32)
    outputs, groups = packed.scales.shape
    grouped = units.reshape(outputs, groups, -1) * packed.scales[:, :, None]
    return grouped.reshape(outputs, -1)


def byte_levels(form: Format) -> np.ndarray:
    """What the two 4-bit codes of every byte stand for, float32 [256, 2], in units of the scale."""
    levels, bytes_ = np.asarray(form.levels, np.float32), np.arange(256)
    return np.stack([levels[bytes_ & 15], levels[bytes_ >> 4]], axis=1)


def divides(form: Format, inputs: int, parts: int) -> bool:
    """Whether the inputs of a weight can be divided into equal parts that share no scale with another."""
    return inputs % parts == 0 and (not form.levels or (inputs // parts) % form.group(inputs) == 0)


def cut(packed: Packed, form: Format, axis: int, part: range, whole: int) -> Packed:
    """Some consecutive outputs (axis 0) or inputs (axis 1) of a weight, with the scales of the whole of it.

    Args:
        whole: how many inputs the weight has.
    """
    if axis == 0:
        rows = slice(part.start, part.stop)
        return Packed(packed.codes[rows], packed.scales[rows])
    columns = slice(part.start * form.bits // 8, part.stop * form.bits // 8)
    group = form.group(whole)
    shared = slice(None) if not form.levels else slice(part.start // group, part.stop // group)
    return Packed(packed.codes[:, columns], packed.scales[:, shared])

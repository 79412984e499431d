"""AdamW's moments in 8 or 4 bits each. NumPy only.

An update is lr * m / (sqrt(v) + eps), so what must be kept is how far each value moves, and by which factor the next
gradients will be divided. Values lie in blocks, one after another in C order, whatever the tensor's shape:

    root r = sqrt(v)   code 0 is zero; codes 1..n divide the block's range from its smallest to its largest root above
                       zero into equal ratios, so a small second moment stays as exact as a large one and never
                       becomes zero under its first moment
    step u = m / r'    with r' what the root's code stands for, so that m' = u' r' carries the rounding of u alone; it
                       is of the order of 1 wherever gradients are, and zero stays zero

    O1  8 bits: 255 ratios; u is a whole number of -127..127 times the block's scale;             blocks of 128
    O2  4 bits: 15 ratios; u is a level of the 4-bit normal float times the block's scale;        blocks of 64

Each block has three numbers beside its codes (the two ends of the range, the scale of u), in bfloat16, rounded outwards
so that nothing lies beyond them. Measured against other ways in docs/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from erniekit.model.quantization.codes import nearest_codes
from erniekit.model.quantization.formats import NORMAL_FLOAT

_AT_ONCE = 1 << 16  # values that are worked on at once, for that takes room beside them
_LARGEST = np.float32(np.finfo(np.float32).max)
_LARGEST_END = np.array(0x7F7F0000, np.uint32).view(np.float32)  # of bfloat16
_SMALLEST = np.float32(np.finfo(np.float32).smallest_subnormal)
_LEVELS = np.array(NORMAL_FLOAT, np.float32)


class NotEncodableError(ValueError):
    """Moments that no codes stand for: not finite, or a second moment below zero."""


@dataclass(frozen=True)
class MomentFormat:
    """What the codes mean; see the module.

    Attributes:
        stage: its name, a value of `ckpt_quant_stage`.
        bits: of a code.
        block: values that share a range and a scale.
    """

    stage: str
    bits: int
    block: int

    def __str__(self) -> str:
        return f"AdamW's moments in {self.bits} bits (ckpt_quant_stage {self.stage})"

    def blocks(self, size: int) -> int:
        """Of a tensor with so many values; the last one may have fewer."""
        return -(-size // self.block)

    def code_bytes(self, size: int) -> int:
        """Of one moment of a tensor with so many values."""
        return size if self.bits == 8 else -(-size // 2)

    @property
    def ratios(self) -> int:
        """Codes of a root that is not zero."""
        return (1 << self.bits) - 1


O1 = MomentFormat("O1", bits=8, block=128)
O2 = MomentFormat("O2", bits=4, block=64)
FORMATS = {form.stage: form for form in (O1, O2)}


class RootCodes(NamedTuple):
    """Square roots of second moments.

    Attributes:
        codes: uint8, one to a byte, or two, the first in the lower half.
        low, high: float32 [blocks], the smallest and the largest root above zero; 0 where there is none.
    """

    codes: np.ndarray
    low: np.ndarray
    high: np.ndarray


class StepCodes(NamedTuple):
    """First moments in units of those roots.

    Attributes:
        codes: int8, or uint8 with two to a byte.
        scale: float32 [blocks].
    """

    codes: np.ndarray
    scale: np.ndarray


def encode_second(moment2: np.ndarray, form: MomentFormat) -> RootCodes:
    """Codes of the second moment.

    Raises:
        NotEncodableError: a value is not finite, or below zero.
    """
    values, size = moment2.reshape(-1), moment2.size
    encoded = RootCodes(*_room(form, size, np.uint8, 2))
    for part in _parts(size, form):
        chunk = values[part]
        if not np.isfinite(chunk).all() or (chunk < 0).any():
            raise NotEncodableError("a second moment is not finite, or below zero")
        roots = _in_blocks(np.sqrt(chunk.astype(np.float32, copy=False)), form)
        above = roots > 0
        blocks = _blocks_of(part, form)
        low = _towards_zero(np.where(above, roots, _LARGEST).min(axis=1))
        high = _away_from_zero(roots.max(axis=1))
        encoded.low[blocks] = low = np.where(high > 0, low, np.float32(0))
        encoded.high[blocks] = high
        base, ratio = _logarithms(low, high)
        units = (np.log(np.where(above, roots, np.float32(1))) - base) / np.where(ratio > 0, ratio, np.float32(1))
        codes = np.clip(np.rint(units * (form.ratios - 1)), 0, form.ratios - 1) + 1
        _put(encoded.codes, part, np.where(above, codes, 0).astype(np.uint8), form)
    return encoded


def decode_second(encoded: RootCodes, shape: tuple[int, ...], form: MomentFormat) -> np.ndarray:
    """The second moment, float32: above zero exactly where it was, and finite."""
    values = np.empty(int(np.prod(shape)), np.float32)
    for part in _parts(values.size, form):
        roots = _roots(encoded, part, form)
        with np.errstate(over="ignore"):
            squares = np.minimum(roots * roots, _LARGEST)
        values[part] = np.where(roots > 0, np.maximum(squares, _SMALLEST), np.float32(0))
    return values.reshape(shape)


def encode_first(moment1: np.ndarray, second: RootCodes, form: MomentFormat) -> StepCodes:
    """Codes of the first moment beside those of the second. Where that is zero no gradient has been, and this is zero.

    Raises:
        NotEncodableError: a value is not finite.
    """
    values, size = moment1.reshape(-1), moment1.size
    encoded = StepCodes(*_room(form, size, np.int8 if form.bits == 8 else np.uint8, 1))
    for part in _parts(size, form):
        chunk = values[part].astype(np.float32, copy=False)
        if not np.isfinite(chunk).all():
            raise NotEncodableError("a first moment is not finite")
        roots = _roots(second, part, form)
        with np.errstate(over="ignore"):
            steps = np.where(roots > 0, chunk / np.where(roots > 0, roots, np.float32(1)), np.float32(0))
        steps = _in_blocks(np.clip(steps, -_LARGEST_END, _LARGEST_END), form)
        scale = _away_from_zero(np.abs(steps).max(axis=1))
        encoded.scale[_blocks_of(part, form)] = scale
        units = steps / np.where(scale > 0, scale, np.float32(1))[:, None]
        _put(
            encoded.codes,
            part,
            np.rint(units * 127).astype(np.int8) if form.bits == 8 else nearest_codes(units, _LEVELS),
            form,
        )
    return encoded


def decode_first(encoded: StepCodes, second: RootCodes, shape: tuple[int, ...], form: MomentFormat) -> np.ndarray:
    """The first moment, float32, finite."""
    values = np.empty(int(np.prod(shape)), np.float32)
    for part in _parts(values.size, form):
        codes = _taken(encoded.codes, part, form)
        units = codes.astype(np.float32) / 127 if form.bits == 8 else _LEVELS[codes]
        steps = _in_blocks(units, form) * encoded.scale[_blocks_of(part, form), None]
        with np.errstate(over="ignore"):
            moments = steps.reshape(-1)[: units.size] * _roots(second, part, form)
        values[part] = np.clip(moments, -_LARGEST, _LARGEST)
    return values.reshape(shape)


def _roots(encoded: RootCodes, part: slice, form: MomentFormat) -> np.ndarray:
    """What the codes of some values stand for, flat."""
    blocks = _blocks_of(part, form)
    taken = _taken(encoded.codes, part, form)
    codes = _in_blocks(taken, form)
    base, ratio = _logarithms(encoded.low[blocks], encoded.high[blocks])
    powers = np.exp(base + (codes.astype(np.float32) - 1) * (ratio / np.float32(form.ratios - 1)))
    return np.where(codes > 0, powers, np.float32(0)).reshape(-1)[: taken.size]


def _logarithms(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the smallest root of each block, and of its ratio to the largest, [blocks, 1]; 0 for blocks of zeros."""
    base = np.log(np.where(low > 0, low, np.float32(1)))
    return base[:, None], (np.log(np.where(high > 0, high, np.float32(1))) - base)[:, None]


def _room(form: MomentFormat, size: int, codes: type, numbers: int) -> tuple[np.ndarray, ...]:
    return np.empty(form.code_bytes(size), codes), *(np.empty(form.blocks(size), np.float32) for _ in range(numbers))


def _parts(size: int, form: MomentFormat) -> Iterator[slice]:
    """The values in parts of whole blocks."""
    step = _AT_ONCE // form.block * form.block
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def _blocks_of(part: slice, form: MomentFormat) -> slice:
    return slice(part.start // form.block, form.blocks(part.stop))


def _in_blocks(values: np.ndarray, form: MomentFormat) -> np.ndarray:
    """[blocks, block], the last one filled up with zeros."""
    lacking = -values.size % form.block
    return (np.pad(values, (0, lacking)) if lacking else values).reshape(-1, form.block)


def _put(stored: np.ndarray, part: slice, codes: np.ndarray, form: MomentFormat) -> None:
    """Store the codes of some values; `codes` may have more behind them, of a block that is filled up."""
    flat = codes.reshape(-1)
    if form.bits == 8:
        stored[part] = flat[: part.stop - part.start]
        return
    count = form.code_bytes(part.stop - part.start)
    pairs = flat[: 2 * count]
    stored[part.start // 2 : part.start // 2 + count] = pairs[0::2] | pairs[1::2] << 4


def _taken(stored: np.ndarray, part: slice, form: MomentFormat) -> np.ndarray:
    """The codes of some values, one to a byte."""
    if form.bits == 8:
        return stored[part]
    pairs = stored[part.start // 2 : -(-part.stop // 2)]
    return np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)[: part.stop - part.start]


def _towards_zero(values: np.ndarray) -> np.ndarray:
    """The bfloat16 nearest to each positive float32 that is not above it, as float32."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _away_from_zero(values: np.ndarray) -> np.ndarray:
    """The bfloat16 nearest to each positive float32 that is not below it, as float32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) + np.uint32(0xFFFF)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)

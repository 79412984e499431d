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

_CHUNK_VALUES = 1 << 16  # values that are worked on at once, for that takes room beside them
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
        level: its name, a value of `ckpt_quant_stage`.
        bits: of a code.
        block_size: values that share a range and a scale.
    """

    level: str
    bits: int
    block_size: int

    def __str__(self) -> str:
        return f"AdamW's moments in {self.bits} bits (ckpt_quant_stage {self.level})"

    def num_blocks(self, size: int) -> int:
        """Of a tensor with so many values; the last one may have fewer."""
        return -(-size // self.block_size)

    def code_bytes(self, size: int) -> int:
        """Of one moment of a tensor with so many values."""
        return size if self.bits == 8 else -(-size // 2)

    @property
    def num_ratios(self) -> int:
        """Codes of a root that is not zero."""
        return (1 << self.bits) - 1


O1 = MomentFormat("O1", bits=8, block_size=128)
O2 = MomentFormat("O2", bits=4, block_size=64)
FORMATS = {fmt.level: fmt for fmt in (O1, O2)}


class SecondMomentCodes(NamedTuple):
    """Square roots of second moments.

    Attributes:
        codes: uint8, one to a byte, or two, the first in the lower half.
        low, high: float32 [blocks], the smallest and the largest root above zero; 0 where there is none.
    """

    codes: np.ndarray
    low: np.ndarray
    high: np.ndarray


class FirstMomentCodes(NamedTuple):
    """First moments in units of those roots.

    Attributes:
        codes: int8, or uint8 with two to a byte.
        scale: float32 [blocks].
    """

    codes: np.ndarray
    scale: np.ndarray


def encode_second(moment2: np.ndarray, fmt: MomentFormat) -> SecondMomentCodes:
    """Codes of the second moment.

    Raises:
        NotEncodableError: a value is not finite, or below zero.
    """
    values, size = moment2.reshape(-1), moment2.size
    encoded = SecondMomentCodes(*_allocate(fmt, size, np.uint8, 2))
    for span in _chunks(size, fmt):
        chunk = values[span]
        if not np.isfinite(chunk).all() or (chunk < 0).any():
            raise NotEncodableError("a second moment is not finite, or below zero")
        roots = _in_blocks(np.sqrt(chunk.astype(np.float32, copy=False)), fmt)
        above = roots > 0
        blocks = _blocks_of(span, fmt)
        low = _towards_zero(np.where(above, roots, _LARGEST).min(axis=1))
        high = _away_from_zero(roots.max(axis=1))
        encoded.low[blocks] = low = np.where(high > 0, low, np.float32(0))
        encoded.high[blocks] = high
        base, ratio = _logarithms(low, high)
        units = (np.log(np.where(above, roots, np.float32(1))) - base) / np.where(ratio > 0, ratio, np.float32(1))
        codes = np.clip(np.rint(units * (fmt.num_ratios - 1)), 0, fmt.num_ratios - 1) + 1
        _pack(encoded.codes, span, np.where(above, codes, 0).astype(np.uint8), fmt)
    return encoded


def decode_second(encoded: SecondMomentCodes, shape: tuple[int, ...], fmt: MomentFormat) -> np.ndarray:
    """The second moment, float32: above zero exactly where it was, and finite."""
    values = np.empty(int(np.prod(shape)), np.float32)
    for span in _chunks(values.size, fmt):
        roots = _roots(encoded, span, fmt)
        with np.errstate(over="ignore"):
            squares = np.minimum(roots * roots, _LARGEST)
        values[span] = np.where(roots > 0, np.maximum(squares, _SMALLEST), np.float32(0))
    return values.reshape(shape)


def encode_first(moment1: np.ndarray, second: SecondMomentCodes, fmt: MomentFormat) -> FirstMomentCodes:
    """Codes of the first moment beside those of the second. Where that is zero no gradient has been, and this is zero.

    Raises:
        NotEncodableError: a value is not finite.
    """
    values, size = moment1.reshape(-1), moment1.size
    encoded = FirstMomentCodes(*_allocate(fmt, size, np.int8 if fmt.bits == 8 else np.uint8, 1))
    for span in _chunks(size, fmt):
        chunk = values[span].astype(np.float32, copy=False)
        if not np.isfinite(chunk).all():
            raise NotEncodableError("a first moment is not finite")
        roots = _roots(second, span, fmt)
        with np.errstate(over="ignore"):
            steps = np.where(roots > 0, chunk / np.where(roots > 0, roots, np.float32(1)), np.float32(0))
        steps = _in_blocks(np.clip(steps, -_LARGEST_END, _LARGEST_END), fmt)
        scale = _away_from_zero(np.abs(steps).max(axis=1))
        encoded.scale[_blocks_of(span, fmt)] = scale
        units = steps / np.where(scale > 0, scale, np.float32(1))[:, None]
        _pack(
            encoded.codes,
            span,
            np.rint(units * 127).astype(np.int8) if fmt.bits == 8 else nearest_codes(units, _LEVELS),
            fmt,
        )
    return encoded


def decode_first(
    encoded: FirstMomentCodes, second: SecondMomentCodes, shape: tuple[int, ...], fmt: MomentFormat
) -> np.ndarray:
    """The first moment, float32, finite."""
    values = np.empty(int(np.prod(shape)), np.float32)
    for span in _chunks(values.size, fmt):
        codes = _unpacked(encoded.codes, span, fmt)
        units = codes.astype(np.float32) / 127 if fmt.bits == 8 else _LEVELS[codes]
        steps = _in_blocks(units, fmt) * encoded.scale[_blocks_of(span, fmt), None]
        with np.errstate(over="ignore"):
            moments = steps.reshape(-1)[: units.size] * _roots(second, span, fmt)
        values[span] = np.clip(moments, -_LARGEST, _LARGEST)
    return values.reshape(shape)


def _roots(encoded: SecondMomentCodes, span: slice, fmt: MomentFormat) -> np.ndarray:
    """What the codes of some values stand for, flat."""
    blocks = _blocks_of(span, fmt)
    unpacked = _unpacked(encoded.codes, span, fmt)
    codes = _in_blocks(unpacked, fmt)
    base, ratio = _logarithms(encoded.low[blocks], encoded.high[blocks])
    powers = np.exp(base + (codes.astype(np.float32) - 1) * (ratio / np.float32(fmt.num_ratios - 1)))
    return np.where(codes > 0, powers, np.float32(0)).reshape(-1)[: unpacked.size]


def _logarithms(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the smallest root of each block, and of its ratio to the largest, [blocks, 1]; 0 for blocks of zeros."""
    base = np.log(np.where(low > 0, low, np.float32(1)))
    return base[:, None], (np.log(np.where(high > 0, high, np.float32(1))) - base)[:, None]


def _allocate(fmt: MomentFormat, size: int, codes: type, numbers: int) -> tuple[np.ndarray, ...]:
    return np.empty(fmt.code_bytes(size), codes), *(np.empty(fmt.num_blocks(size), np.float32) for _ in range(numbers))


def _chunks(size: int, fmt: MomentFormat) -> Iterator[slice]:
    """The values in parts of whole blocks."""
    step = _CHUNK_VALUES // fmt.block_size * fmt.block_size
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def _blocks_of(span: slice, fmt: MomentFormat) -> slice:
    return slice(span.start // fmt.block_size, fmt.num_blocks(span.stop))


def _in_blocks(values: np.ndarray, fmt: MomentFormat) -> np.ndarray:
    """[blocks, block], the last one filled up with zeros."""
    lacking = -values.size % fmt.block_size
    return (np.pad(values, (0, lacking)) if lacking else values).reshape(-1, fmt.block_size)


def _pack(stored: np.ndarray, span: slice, codes: np.ndarray, fmt: MomentFormat) -> None:
    """Store the codes of some values; `codes` may have more behind them, of a block that is filled up."""
    flat = codes.reshape(-1)
    if fmt.bits == 8:
        stored[span] = flat[: span.stop - span.start]
        return
    count = fmt.code_bytes(span.stop - span.start)
    pairs = flat[: 2 * count]
    stored[span.start // 2 : span.start // 2 + count] = pairs[0::2] | pairs[1::2] << 4


def _unpacked(stored: np.ndarray, span: slice, fmt: MomentFormat) -> np.ndarray:
    """The codes of some values, one to a byte."""
    if fmt.bits == 8:
        return stored[span]
    pairs = stored[span.start // 2 : -(-span.stop // 2)]
    return np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)[: span.stop - span.start]


def _towards_zero(values: np.ndarray) -> np.ndarray:
    """The bfloat16 nearest to each positive float32 that is not above it, as float32."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _away_from_zero(values: np.ndarray) -> np.ndarray:
    """The bfloat16 nearest to each positive float32 that is not below it, as float32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) + np.uint32(0xFFFF)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)

"""Quantize AdamW's moments to 8 or 4 bits each, and store them in checkpoints (`ckpt_quant_stage`). NumPy only.

An update is lr * m / (sqrt(v) + eps), so the codes must preserve how far each value moves, and the factor by which the
next gradients are divided. Values are in blocks, consecutive in C order, whatever the tensor's shape:

    root r = sqrt(v)   code 0 is zero; codes 1..n divide the block's range from its smallest to its largest root above
                       zero into equal ratios, so a small second moment stays as exact as a large one and never
                       becomes zero under its first moment
    step u = m / r'    with r' the value of the root's code, so that m' = u' r' contains the rounding of u alone; it
                       is of the order of 1 wherever gradients are, and zero stays zero

    O1  8 bits: 255 ratios; u is an integer of -127..127 times the block's scale;                 blocks of 128
    O2  4 bits: 15 ratios; u is a level of the 4-bit normal float times the block's scale;        blocks of 64

Each block has three numbers in addition to its codes (the two ends of the range, the scale of u), in bfloat16, rounded
outwards so that all values are inside. docs/benchmarks.md compares this with other methods.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from erniekit.errors import CheckpointError
from erniekit.model.local_tensors import FullTensors
from erniekit.model.quantization.codes import nearest_codes
from erniekit.model.quantization.formats import NORMAL_FLOAT
from erniekit.model.storage.safetensors import StoredTensor
from erniekit.training.checkpoint.tensors import TensorFiles

_CHUNK_VALUES = 1 << 16  # values processed at a time, because that needs additional memory
_LARGEST = np.float32(np.finfo(np.float32).max)
_LARGEST_END = np.array(0x7F7F0000, np.uint32).view(np.float32)  # the largest finite bfloat16
_SMALLEST = np.float32(np.finfo(np.float32).smallest_subnormal)
_LEVELS = np.array(NORMAL_FLOAT, np.float32)


class NotEncodableError(ValueError):
    """Moments that cannot be quantized: not finite, or a second moment below zero."""


@dataclass(frozen=True)
class MomentFormat:
    """A quantization format of the moments; see the module docstring.

    Attributes:
        level: its name, a value of `ckpt_quant_stage`.
        bits: per code.
        block_size: number of values that share a range and a scale.
    """

    level: str
    bits: int
    block_size: int

    def __str__(self) -> str:
        return f"AdamW's moments in {self.bits} bits (ckpt_quant_stage {self.level})"

    def num_blocks(self, size: int) -> int:
        """Return the number of blocks of a tensor with so many values; the last block may be smaller."""
        return -(-size // self.block_size)

    def code_bytes(self, size: int) -> int:
        """Return the bytes of one moment of a tensor with so many values."""
        return size if self.bits == 8 else -(-size // 2)

    @property
    def num_ratios(self) -> int:
        """The number of codes of a root that is not zero."""
        return (1 << self.bits) - 1


O1 = MomentFormat("O1", bits=8, block_size=128)
O2 = MomentFormat("O2", bits=4, block_size=64)
FORMATS = {fmt.level: fmt for fmt in (O1, O2)}


class SecondMomentCodes(NamedTuple):
    """Quantized square roots of second moments.

    Attributes:
        codes: uint8, one or two per byte, the first in the lower half.
        low, high: float32 [blocks], the smallest and the largest root above zero; 0 if there is none.
    """

    codes: np.ndarray
    low: np.ndarray
    high: np.ndarray


class FirstMomentCodes(NamedTuple):
    """Quantized first moments in units of those roots.

    Attributes:
        codes: int8, or uint8 with two per byte.
        scale: float32 [blocks].
    """

    codes: np.ndarray
    scale: np.ndarray


def encode_second(moment2: np.ndarray, fmt: MomentFormat) -> SecondMomentCodes:
    """Quantize the second moment.

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
    """Return the second moment, float32: above zero exactly where it was, and finite."""
    values = np.empty(int(np.prod(shape)), np.float32)
    for span in _chunks(values.size, fmt):
        roots = _roots(encoded, span, fmt)
        with np.errstate(over="ignore"):
            squares = np.minimum(roots * roots, _LARGEST)
        values[span] = np.where(roots > 0, np.maximum(squares, _SMALLEST), np.float32(0))
    return values.reshape(shape)


def encode_first(moment1: np.ndarray, second: SecondMomentCodes, fmt: MomentFormat) -> FirstMomentCodes:
    """Quantize the first moment, given the codes of the second. Where the second is zero, the first is stored as zero.

    A second moment of zero means that the value never had a gradient.

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
    """Return the first moment, float32, finite."""
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
    """Return the roots of a span of values, flat."""
    blocks = _blocks_of(span, fmt)
    unpacked = _unpacked(encoded.codes, span, fmt)
    codes = _in_blocks(unpacked, fmt)
    base, ratio = _logarithms(encoded.low[blocks], encoded.high[blocks])
    powers = np.exp(base + (codes.astype(np.float32) - 1) * (ratio / np.float32(fmt.num_ratios - 1)))
    return np.where(codes > 0, powers, np.float32(0)).reshape(-1)[: unpacked.size]


def _logarithms(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the logarithm of each block's smallest root, and of the ratio of its largest to it, [blocks, 1]; 0 for
    zeros."""
    base = np.log(np.where(low > 0, low, np.float32(1)))
    return base[:, None], (np.log(np.where(high > 0, high, np.float32(1))) - base)[:, None]


def _allocate(fmt: MomentFormat, size: int, codes: type, numbers: int) -> tuple[np.ndarray, ...]:
    return np.empty(fmt.code_bytes(size), codes), *(np.empty(fmt.num_blocks(size), np.float32) for _ in range(numbers))


def _chunks(size: int, fmt: MomentFormat) -> Iterator[slice]:
    """Yield spans of complete blocks."""
    step = _CHUNK_VALUES // fmt.block_size * fmt.block_size
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def _blocks_of(span: slice, fmt: MomentFormat) -> slice:
    return slice(span.start // fmt.block_size, fmt.num_blocks(span.stop))


def _in_blocks(values: np.ndarray, fmt: MomentFormat) -> np.ndarray:
    """Return the values as [blocks, block], the last block padded with zeros."""
    lacking = -values.size % fmt.block_size
    return (np.pad(values, (0, lacking)) if lacking else values).reshape(-1, fmt.block_size)


def _pack(stored: np.ndarray, span: slice, codes: np.ndarray, fmt: MomentFormat) -> None:
    """Store the codes of a span; `codes` may be longer, because its last block is padded."""
    flat = codes.reshape(-1)
    if fmt.bits == 8:
        stored[span] = flat[: span.stop - span.start]
        return
    count = fmt.code_bytes(span.stop - span.start)
    pairs = flat[: 2 * count]
    stored[span.start // 2 : span.start // 2 + count] = pairs[0::2] | pairs[1::2] << 4


def _unpacked(stored: np.ndarray, span: slice, fmt: MomentFormat) -> np.ndarray:
    """Return the codes of a span, one per byte."""
    if fmt.bits == 8:
        return stored[span]
    pairs = stored[span.start // 2 : -(-span.stop // 2)]
    return np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)[: span.stop - span.start]


def _towards_zero(values: np.ndarray) -> np.ndarray:
    """Round each positive float32 down to a bfloat16, returned as float32."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _away_from_zero(values: np.ndarray) -> np.ndarray:
    """Round each positive float32 up to a bfloat16, returned as float32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) + np.uint32(0xFFFF)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


# Quantized moments in the files of a checkpoint.
#
# For a parameter with n values these tensors replace `<parameter>/moment1` and `<parameter>/moment2`:
#
#     <parameter>/moment2_codes  U8 [n], or [n / 2] with two per byte     roots of the second moment
#     <parameter>/moment2_low    BF16 [blocks]                            the range of each block's roots
#     <parameter>/moment2_high   BF16 [blocks]
#     <parameter>/moment1_codes  I8 [n], or U8 [n / 2]                    first moment in units of those roots
#     <parameter>/moment1_scale  BF16 [blocks]
#     <parameter>/moments_shape  I64 [dimensions]                         of the parameter
#
# The file's metadata names the format, so reading needs no parameter. Norms and biases, master weights and the powers
# of the betas are not quantized. The input is what a file would contain: full tensors or a rank's shards, one moment at
# a time.

LEVEL_KEY, VERSION_KEY, VERSION = "ckpt_quant_stage", "moment_codes", "1"
_FIRST, _SECOND, _SHAPE = "/moment1", "/moment2", "/moments_shape"
_LONGEST_VECTOR = 1 << 16  # of a norm or a bias; longer vectors are shards of a matrix
_FIRST_SUFFIXES, _SECOND_SUFFIXES = ("_codes", "_scale"), ("_codes", "_low", "_high")


class CompressedState:
    """`FullTensors` of an optimizer with quantized moments. Reads one moment at a time.

    Attributes:
        metadata: for the files.
    """

    def __init__(self, full: FullTensors, fmt: MomentFormat) -> None:
        self._full, self._fmt = full, fmt
        self._stored: dict[str, StoredTensor] = {}
        own = {name: full.stored(name) for name in full.names}
        for name, tensor in own.items():
            parameter = name.removesuffix(_FIRST).removesuffix(_SECOND)
            moments = [own.get(parameter + kind) for kind in (_FIRST, _SECOND)]
            if parameter == name or not all(map(_is_compressed, moments)):
                self._stored[name] = tensor
            elif name.endswith(_FIRST):
                self._stored |= _components(parameter, tensor.shape, fmt)
        self._uncompressed = self._stored.keys() & own.keys()
        self._ready: dict[str, np.ndarray | None] = {}
        self._roots: SecondMomentCodes | None = None  # of the parameter whose first moment is next
        self.names = tuple(self._stored)
        self.metadata = {LEVEL_KEY: fmt.level, VERSION_KEY: VERSION}

    def stored(self, name: str) -> StoredTensor:
        return self._stored[name]

    def read(self, name: str) -> np.ndarray | None:
        """Return a tensor. Raises CheckpointError if a moment is not finite."""
        if name in self._uncompressed:
            return self._full.read(name)
        if name not in self._ready:
            self._ready = dict(self._encoded(name))
        return self._ready.pop(name)

    def _encoded(self, name: str) -> Iterator[tuple[str, np.ndarray | None]]:
        """Yield the component of that name, and the others of the same moment."""
        moment = name.removesuffix("_codes")
        assert moment != name, f"{name}: read out of order"
        of_second = moment.endswith(_SECOND)
        values, codes = self._full.read(moment), None
        try:
            if values is not None:
                codes = self._encode_second(values) if of_second else self._encode_first(values)
        except NotEncodableError as error:
            raise CheckpointError(
                f"{moment}: {error}, so this run is damaged; no checkpoint is written.\n"
                "  Resume from an earlier one with a lower learning_rate or max_grad_norm."
            ) from None
        suffixes = _SECOND_SUFFIXES if of_second else _FIRST_SUFFIXES
        for suffix, component in zip(suffixes, codes or [None] * len(suffixes), strict=True):
            yield moment + suffix, component
        if not of_second:
            yield moment.removesuffix(_FIRST) + _SHAPE, None if values is None else np.array(values.shape, np.int64)

    def _encode_second(self, values: np.ndarray) -> SecondMomentCodes:
        self._roots = encode_second(values, self._fmt)
        return self._roots

    def _encode_first(self, values: np.ndarray) -> FirstMomentCodes:
        assert self._roots is not None
        codes = encode_first(values, self._roots, self._fmt)
        self._roots = None
        return codes


def moment_format_of(files: TensorFiles, folder: Path) -> MomentFormat | None:
    """Return the format of the moments in these files; None: not quantized.

    Raises:
        CheckpointError: the format is unknown to this version, or differs between the files.
    """
    found = {(each.get(LEVEL_KEY), each.get(VERSION_KEY)) for each in files.metadata}
    if found <= {(None, None)}:
        if any(name.endswith((_FIRST + "_codes", _SECOND + "_codes")) for name in files.names):
            raise CheckpointError(f"{folder}: the optimizer's moments are compressed, but the files do not say how")
        return None
    if len(found) > 1:
        raise CheckpointError(
            f"{folder}: the optimizer's files come from several checkpoints: {sorted(map(str, found))}"
        )
    ((level, version),) = found
    if level not in FORMATS or version != VERSION:
        raise CheckpointError(
            f"{folder}: the optimizer's moments are compressed in a format unknown to this version "
            f"({LEVEL_KEY} {level}, {VERSION_KEY} {version}); it reads {', '.join(FORMATS)} of version {VERSION}.\n"
            "  Resume with the version that wrote it, or set ignore_load_lr_and_optim: true for fresh moments."
        )
    return FORMATS[level]


def decompressed(files: TensorFiles, folder: Path) -> TensorFiles:
    """Return the same tensors under the names that they have in an optimizer, with moments in float32.

    Raises:
        CheckpointError: as for `moment_format_of`, or components of a moment are missing; on reading, they do not
            fit each other.
    """
    fmt = moment_format_of(files, folder)
    if fmt is None:
        return files
    parameters = [name.removesuffix(_SHAPE) for name in files.names if name.endswith(_SHAPE)]
    components = {component for name in parameters for component in _components(name, (1,), fmt)}
    if missing := sorted(components - set(files.names)):
        raise CheckpointError(
            f"{folder}: parts of compressed moments are missing, for example {', '.join(missing[:3])}"
        )
    moments = {name + kind: name for name in parameters for kind in (_FIRST, _SECOND)}

    def read(name: str) -> np.ndarray:
        parameter = moments.get(name)
        if parameter is None:
            return files.read(name)
        shape = tuple(int(size) for size in files.read(parameter + _SHAPE))
        stored = _components(parameter, shape, fmt) if all(size >= 0 for size in shape) else {}

        def component(suffix: str) -> np.ndarray:
            values = files.read(parameter + suffix)
            if parameter + suffix not in stored or values.shape != stored[parameter + suffix].shape:
                raise CheckpointError(f"{folder}: {parameter + suffix} {list(values.shape)} fits no {list(shape)}")
            return values

        roots = SecondMomentCodes(*(component(_SECOND + suffix) for suffix in _SECOND_SUFFIXES))
        if name.endswith(_SECOND):
            return decode_second(roots, shape, fmt)
        return decode_first(
            FirstMomentCodes(*(component(_FIRST + suffix) for suffix in _FIRST_SUFFIXES)), roots, shape, fmt
        )

    others = [name for name in files.names if name not in components]
    return TensorFiles((*others, *moments), read, files.metadata)


def _is_compressed(moment: StoredTensor | None) -> bool:
    if moment is None or moment.dtype not in ("F32", "BF16"):
        return False
    size = math.prod(moment.shape)
    return size > _LONGEST_VECTOR or (len(moment.shape) > 1 and size > 0)


def _components(parameter: str, shape: tuple[int, ...], fmt: MomentFormat) -> dict[str, StoredTensor]:
    """Return the tensors that a file contains for a parameter's moments, in the order in which they are computed."""
    size = math.prod(shape)
    codes, num_blocks = (fmt.code_bytes(size),), (fmt.num_blocks(size),)
    return {
        f"{parameter}{_SECOND}_codes": StoredTensor("U8", codes),
        f"{parameter}{_SECOND}_low": StoredTensor("BF16", num_blocks),
        f"{parameter}{_SECOND}_high": StoredTensor("BF16", num_blocks),
        f"{parameter}{_FIRST}_codes": StoredTensor("I8" if fmt.bits == 8 else "U8", codes),
        f"{parameter}{_FIRST}_scale": StoredTensor("BF16", num_blocks),
        f"{parameter}{_SHAPE}": StoredTensor("I64", (len(shape),)),
    }

"""Quantize values to codes and back (see `formats`). NumPy only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from erniekit.errors import ModelFileError
from erniekit.model.quantization.formats import Format

_BLOCK = 1 << 20  # values quantized at a time, because that needs additional memory


class QuantizedTensor(NamedTuple):
    """A quantized weight.

    Attributes:
        codes: int8 [out, in], or two 4-bit codes per byte, uint8 [out, in / 2].
        scales: float32 [out, in / group].
    """

    codes: np.ndarray
    scales: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def quantize(values: np.ndarray, form: Format, name: str = "a weight") -> QuantizedTensor:
    """Quantize a weight [out, in] to the nearest codes; the largest value of each group is exact.

    Args:
        name: of the weight, for the error.

    Raises:
        ModelFileError: a value is not finite, or 4-bit codes are asked for and the number of inputs is odd.
    """
    outputs, inputs = values.shape
    if form.bits == 4 and inputs % 2:
        raise ModelFileError(f"{name}: {inputs} inputs cannot be stored two to a byte; use weight_only_int8")
    code_shape, scale_shape = form.shapes(outputs, inputs)
    packed = QuantizedTensor(
        np.empty(code_shape, np.uint8 if form.levels else np.int8), np.empty(scale_shape, np.float32)
    )
    step = max(1, _BLOCK // inputs)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        packed.codes[rows], packed.scales[rows] = _quantize_rows(np.asarray(values[rows], np.float32), form)
    if not np.isfinite(packed.scales).all():
        raise ModelFileError(f"{name}: contains values that are not finite; the weights are damaged")
    return packed


def _quantize_rows(values: np.ndarray, form: Format) -> tuple[np.ndarray, np.ndarray]:
    rows, inputs = values.shape
    grouped = values.reshape(rows, -1, form.group(inputs))
    scales = np.abs(grouped).max(axis=2) / np.float32(form.largest)
    with np.errstate(invalid="ignore"):  # values that are not finite are rejected afterwards
        units = (grouped / np.where(scales > 0, scales, np.float32(1))[:, :, None]).reshape(rows, inputs)
        if not form.levels:
            return np.rint(units).astype(np.int8), scales
        levels = np.asarray(form.levels, np.float32)
        codes = nearest_codes(units, levels)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales


def nearest_codes(units: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return the indices (uint8) of the nearest of a few ascending levels.

    Comparing with every border between two levels is many times as fast as a binary search.
    """
    codes = np.zeros(units.shape, np.uint8)
    for border in (levels[1:] + levels[:-1]) / 2:
        codes += units > border
    return codes


def dequantize(packed: QuantizedTensor, form: Format) -> np.ndarray:
    """Return the values [out, in] of the codes, float32."""
    units = byte_levels(form)[packed.codes] if form.levels else packed.codes.astype(np.float32)
    outputs, groups = packed.scales.shape
    grouped = units.reshape(outputs, groups, -1) * packed.scales[:, :, None]
    return grouped.reshape(outputs, -1)


def byte_levels(form: Format) -> np.ndarray:
    """Return the values of the two 4-bit codes in every byte, float32 [256, 2], in units of the scale."""
    levels, bytes_ = np.asarray(form.levels, np.float32), np.arange(256)
    return np.stack([levels[bytes_ & 15], levels[bytes_ >> 4]], axis=1)


def slice_quantized(packed: QuantizedTensor, form: Format, axis: int, part: range, whole: int) -> QuantizedTensor:
    """Slice consecutive outputs (axis 0) or inputs (axis 1) out of a weight; the scales stay those of the full weight.

    Args:
        whole: number of inputs of the full weight.
    """
    if axis == 0:
        rows = slice(part.start, part.stop)
        return QuantizedTensor(packed.codes[rows], packed.scales[rows])
    columns = slice(part.start * form.bits // 8, part.stop * form.bits // 8)
    group = form.group(whole)
    shared = slice(None) if not form.levels else slice(part.start // group, part.stop // group)
    return QuantizedTensor(packed.codes[:, columns], packed.scales[:, shared])

"""Round float32 weights to the type they are stored in. NumPy only."""

from __future__ import annotations

import numpy as np

from erniekit.errors import ModelFileError

STORED_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # a configuration's name -> the file's name


def to_stored(name: str, values: np.ndarray, dtype: str) -> np.ndarray:
    """Convert values to `dtype` ("F32", "BF16" or "F16") in C order; bfloat16 as the uint16 of its bits.

    Rounds once, to nearest, ties to even.

    Args:
        name: of the tensor, for the error.

    Raises:
        ModelFileError: a finite value is beyond the range of the type.
    """
    if dtype == "F32":
        return np.ascontiguousarray(values, np.float32)
    if dtype == "BF16":
        stored = round_to_bfloat16(values)
        infinite = (stored & 0x7FFF) == 0x7F80
    elif dtype == "F16":
        with np.errstate(over="ignore"):
            stored = np.ascontiguousarray(values, np.float16)
        infinite = np.isinf(stored)
    else:
        raise ValueError(f"{dtype}: weights are stored as one of {', '.join(STORED_TYPES.values())}")
    overflowing = infinite & np.isfinite(values)
    if overflowing.any():
        largest = float(np.abs(values[overflowing]).max())
        shown, wider = ("bfloat16", "float32") if dtype == "BF16" else ("float16", "bfloat16")
        raise ModelFileError(f"{name} contains {largest:.6g}, beyond the range of {shown}; use --dtype {wider}")
    return stored


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the bits (uint16) of the bfloat16 nearest to each float32, ties to even; NaN stays NaN.

    bfloat16 is the upper half of float32. Adding 0x7FFF plus the lowest bit that stays carries into that bit exactly if
    the lower half is above one half, or is one half and the bit is odd.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    quiet_nan = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet_nan, rounded)

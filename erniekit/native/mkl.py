"""Products in float32 by the MKL of Paddle's wheel, for what no operator of Paddle does: adding to a matrix."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

ROW_MAJOR, AS_IT_IS, TRANSPOSED = 101, 111, 112  # as in cblas.h


@cache
def sgemm() -> Any:
    """Return `cblas_sgemm`, which takes pointers as ints; None in a build of Paddle without MKL."""
    spec = importlib.util.find_spec("paddle")
    file = Path(spec.origin or "").parent / "libs" / "libmklml_intel.so" if spec else None
    if file is None or not file.is_file():
        return None
    function = ctypes.CDLL(str(file)).cblas_sgemm
    sizes: list[Any] = [ctypes.c_int] * 6
    factor: Any = ctypes.c_float
    matrix: list[Any] = [ctypes.c_void_p, ctypes.c_int]
    function.argtypes, function.restype = [*sizes, factor, *matrix, *matrix, factor, *matrix], None
    return function


def add_product(rows: int, columns: int, inner: int, a: int, b: int, total: int) -> None:
    """Compute total += a^T b of float32 matrices a [inner, rows], b [inner, columns] and total [rows, columns]."""
    transpositions = TRANSPOSED, AS_IT_IS
    sgemm()(ROW_MAJOR, *transpositions, rows, columns, inner, 1.0, a, rows, b, columns, 1.0, total, columns)

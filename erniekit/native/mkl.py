"""The MKL of Paddle's wheel: its threads, and its float32 products where no operator of Paddle serves: those that are
added to a matrix, and those inside of a step of decoding."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from erniekit.native.openmp import paddle_libraries

ROW_MAJOR, AS_IT_IS, TRANSPOSED = 101, 111, 112  # as in cblas.h


@cache
def library() -> Any:
    """Return the library; None in a build of Paddle without MKL."""
    folder = paddle_libraries()
    file = None if folder is None else folder / "libmklml_intel.so"
    return ctypes.CDLL(str(file)) if file is not None and file.is_file() else None


@cache
def sgemm() -> Any:
    """Return `cblas_sgemm`, which takes pointers as ints; None without MKL."""
    if library() is None:
        return None
    function = library().cblas_sgemm
    sizes: list[Any] = [ctypes.c_int] * 6
    factor: Any = ctypes.c_float
    matrix: list[Any] = [ctypes.c_void_p, ctypes.c_int]
    function.argtypes, function.restype = [*sizes, factor, *matrix, *matrix, factor, *matrix], None
    return function


def sgemm_address() -> int | None:
    """Return the address of `cblas_sgemm`, for C; None without MKL."""
    return None if sgemm() is None else ctypes.cast(sgemm(), ctypes.c_void_p).value


def add_product(rows: int, columns: int, inner: int, a: int, b: int, total: int) -> None:
    """Compute total += a^T b of float32 matrices a [inner, rows], b [inner, columns] and total [rows, columns]."""
    transpositions = TRANSPOSED, AS_IT_IS
    sgemm()(ROW_MAJOR, *transpositions, rows, columns, inner, 1.0, a, rows, b, columns, 1.0, total, columns)

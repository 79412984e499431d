"""The weight of a product as our C library has it, in any of its forms, and one product with it (`source/decode.h`)."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from erniekit.native import library
from erniekit.native.mkl import sgemm_address

INPUTS_FIRST, OUTPUTS_FIRST, BYTES, NIBBLES, BF16 = range(5)  # `Form`


def fields(**names: Any) -> list[tuple[str, Any]]:
    """Return the fields of a structure: of each group a type and the names that have it."""
    return [(name, kind) for kind, listed in names.values() for name in listed.split()]


class LinearWeight(ctypes.Structure):
    """`Linear` of decode.h: addresses of arrays, which have to outlive it."""

    _fields_ = fields(
        sizes=(ctypes.c_int64, "form inputs outputs"),
        weights=(ctypes.c_void_p, "weight scales levels"),
        grouping=(ctypes.c_int64, "group"),
        biases=(ctypes.c_void_p, "bias lora_a lora_b"),
        rank=(ctypes.c_int64, "rank"),
        scale=(ctypes.c_float, "lora_scale"),
        columns=(ctypes.c_void_p, "column_scale"),
    )


def can_multiply() -> bool:
    """Return whether there is a library to compute `product`."""
    return library.function("linear_product", "pplppllp") is not None


def product(weight: LinearWeight, rows: int, x: int, y: int) -> None:
    """Compute y = x W for float32 x [rows, in] and y [rows, out] at these addresses; `can_multiply` must be true.

    A row has the same bits whatever the number of threads, and of rows up to 64, is.
    """
    threads, size = ctypes.c_int64(), ctypes.c_int64()
    described = ctypes.addressof(weight)
    library.function("linear_memory", "plpp")(described, rows, ctypes.addressof(threads), ctypes.addressof(size))
    spare = np.empty(threads.value * size.value, np.float32)
    run = library.function("linear_product", "pplppllp")
    run(sgemm_address(), described, rows, x, y, threads.value, size.value, spare.ctypes.data)

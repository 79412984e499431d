"""The memory of parameters: none while layers are created, their own when their values come, as arrays on a CPU.

So a model is filled once: no zeros are written that weights replace, and files and generators write into the parameters
themselves.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import paddle

_C_TYPES: dict[Any, Any] = {paddle.float32: ctypes.c_float, paddle.float64: ctypes.c_double}


def without_memory() -> Any:
    """Return a context in which layers create parameters that have a shape and a type, but no memory."""
    return paddle.LazyGuard()


def allocate(parameter: paddle.Tensor) -> None:
    """Give a parameter memory, with values that have no meaning yet, if it has none."""
    if not parameter._is_initialized():
        paddle.empty(parameter.shape, parameter.dtype)._share_underline_tensor_to(parameter)
        parameter._init_func = None  # it would fill the parameter in `initialize`


def host_array(parameter: paddle.Tensor) -> np.ndarray | None:
    """Return the memory of a parameter as an array to write to; the parameter has to outlive it.

    None: it lies on another device, or has a type that NumPy lacks or would round to in another way (16 bits).
    """
    kind = _C_TYPES.get(parameter.dtype)
    if kind is None or not parameter.place.is_cpu_place() or not parameter.is_contiguous():
        return None
    flat = (kind * parameter.size).from_address(parameter.data_ptr())
    parameter._bump_inplace_version()  # what was made of earlier values is out of date
    return np.ctypeslib.as_array(flat).reshape(parameter.shape)


def place_rows(parameter: paddle.Tensor, rows: slice, values: np.ndarray, *, transposed: bool) -> None:
    """Set some rows of a parameter; of its transpose if `transposed`."""
    values, where = (values.T, (slice(None), rows)) if transposed else (values, rows)
    host = host_array(parameter)
    if host is not None:
        host[where] = values
    else:
        parameter[where] = paddle.to_tensor(np.ascontiguousarray(values)).astype(parameter.dtype)

"""Access to the memory of CPU tensors as NumPy arrays, without a copy if possible."""

from __future__ import annotations

import ctypes

import numpy as np
import paddle
from paddle import Tensor

REDUCED_IN_FLOAT32 = (paddle.float16, paddle.bfloat16)  # NumPy has no bfloat16; sums are rounded once, at the end
NUMPY = {
    paddle.bool: np.bool_,
    paddle.uint8: np.uint8,
    paddle.int8: np.int8,
    paddle.int16: np.int16,
    paddle.int32: np.int32,
    paddle.int64: np.int64,
    paddle.float32: np.float32,
    paddle.float64: np.float64,
}


def size_in_bytes(tensor: Tensor) -> int:
    """Return the size of a tensor's elements in bytes."""
    return int(tensor.size) * int(tensor.element_size())


def read(tensor: Tensor) -> np.ndarray:
    """Return a tensor's elements as flat bytes in index order; they share memory with a contiguous tensor."""
    with paddle.no_grad():
        return _shared(tensor if tensor.is_contiguous() else tensor.contiguous())


def write(tensor: Tensor, data: np.ndarray) -> None:
    """Replace a tensor's elements in place by the flat bytes `data`; autograd does not notice."""
    size = size_in_bytes(tensor)
    if data.nbytes != size:
        raise ValueError(
            f"{data.nbytes} bytes do not fill a tensor of shape {list(tensor.shape)} and {tensor.dtype} ({size}): "
            f"the ranks of the group use different shapes or dtypes, or call collectives in a different order"
        )
    flat = data.reshape(-1).view(np.uint8)
    if tensor.is_contiguous():
        np.copyto(_shared(tensor), flat)
        return
    with paddle.no_grad():
        contiguous = paddle.empty(tensor.shape, dtype=tensor.dtype)
        np.copyto(_shared(contiguous), flat)
        paddle.assign(contiguous, tensor)


def read_numbers(tensor: Tensor) -> np.ndarray:
    """Return a tensor's elements as a flat array for arithmetic; float16 and bfloat16 as a float32 copy."""
    if tensor.dtype in REDUCED_IN_FLOAT32:
        with paddle.no_grad():
            return tensor.astype("float32").numpy().reshape(-1)
    return read(tensor).view(NUMPY[tensor.dtype])


def write_numbers(tensor: Tensor, numbers: np.ndarray) -> None:
    """Replace a tensor's elements in place; the inverse of `read_numbers`."""
    if tensor.dtype in REDUCED_IN_FLOAT32:
        with paddle.no_grad():
            write(tensor, read(paddle.to_tensor(numbers).astype(tensor.dtype)))
    else:
        write(tensor, numbers)


def _shared(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a contiguous tensor. The array keeps the tensor alive."""
    size = size_in_bytes(tensor)
    if size == 0:
        return np.empty(0, np.uint8)  # a tensor without elements has no address
    buffer = (ctypes.c_uint8 * size).from_address(tensor.data_ptr())
    buffer.tensor = tensor  # type: ignore[attr-defined]
    return np.frombuffer(buffer, np.uint8)  # type: ignore[call-overload]

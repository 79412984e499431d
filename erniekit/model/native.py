"""Whether a kernel of our own (`native/source`) computes with given tensors, or Paddle's operators (`cpu_kernels`)."""

from __future__ import annotations

import math
from typing import Any

import paddle

from erniekit.native import library
from erniekit.native.library import PADDLE, Kernels


def use_kernels(wanted: str) -> Kernels:
    """Use the native kernels that `cpu_kernels` names from now on; return those in use on the current device.

    Raises:
        ConfigurationError: a path that is named cannot run here.
    """
    if paddle.get_device() != "cpu":
        return Kernels(PADDLE, "native kernels are for CPUs")
    return library.use(wanted)


def path_in_use() -> str:
    """Return the path of the kernels in use, on which the last bits of results depend; "paddle" if there are none."""
    return library.kernels().path if paddle.get_device() == "cpu" else PADDLE


def computes(*tensors: paddle.Tensor) -> bool:
    """Return whether native code is to compute with these tensors, which it may read and write by their pointers: in
    eager mode on a CPU, contiguous float32 ones, if kernels are in use (`cpu_kernels`)."""
    if not paddle.in_dynamic_mode() or paddle.get_device() != "cpu" or library.kernels().library is None:
        return False
    return all(tensor.dtype == paddle.float32 and tensor.is_contiguous() for tensor in tensors)


def contiguous(x: paddle.Tensor) -> paddle.Tensor:
    """Return x, or where its memory has gaps a copy without."""
    return x if x.is_contiguous() else x.contiguous()


def size(x: paddle.Tensor) -> int:
    """Return the number of elements; Paddle's `size` takes 30 times as long, 7 us."""
    return math.prod(x.shape)


def pointers(*tensors: paddle.Tensor | None) -> list[int | None]:
    """Return the addresses of tensors as arguments of a kernel; None stands for NULL."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def kernel(name: str, arguments: str, *tensors: paddle.Tensor) -> Any:
    """Return the native kernel that is to read or write these tensors; None where Paddle's operators have to run.

    A kernel runs where `computes` says so. It takes `tensor.data_ptr()`s and checks nothing, so name every float32
    tensor whose memory it touches and that the caller has not made itself; indices and labels are the caller's to
    check.

    Args:
        name: of the C function.
        arguments: its signature, a letter for each argument (`native.library.function`).
    """
    return library.function(name, arguments) if computes(*tensors) else None

"""Select the device, query its capabilities, and tune the host's memory allocator."""

from __future__ import annotations

import ctypes
import os
import platform
import re

import paddle

from erniekit.errors import ConfigurationError

GIVEN_GPU = "FLAGS_selected_gpus"  # launchers set this variable to each rank's GPU


def use_device(wanted: str) -> str:
    """Select "auto" (a GPU if there is one), "cpu", "gpu" or "gpu:<n>".

    A rank of a launched job uses the GPU that the launcher assigned to it.

    Returns:
        "cpu" or "gpu:<n>".

    Raises:
        ConfigurationError: this machine, or this build of Paddle, does not have the device.
    """
    gpus = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    if wanted == "auto":
        wanted = "gpu" if gpus else "cpu"
    if wanted == "gpu":
        wanted = f"gpu:{os.environ.get(GIVEN_GPU, '0').partition(',')[0]}"
    if wanted.startswith("gpu:") and int(wanted.removeprefix("gpu:")) >= gpus:
        build = "" if paddle.is_compiled_with_cuda() else "; this is a CPU build of Paddle (see README.md, 'On a GPU')"
        raise ConfigurationError(f"device: {wanted}: this machine has {gpus} GPUs{build}. Set device: cpu or auto")
    paddle.device.set_device(wanted)
    return wanted


def has_flashmask_kernel() -> bool:
    """Return whether the device runs Paddle's `flashmask_attention` (NVIDIA, compute capability 8.0 or newer)."""
    if not paddle.is_compiled_with_cuda() or not paddle.get_device().startswith("gpu"):
        return False
    return paddle.device.cuda.get_device_capability()[0] >= 8


def has_fp8_products() -> bool:
    """Return whether the device and this build of Paddle multiply 8-bit floats.

    That needs an NVIDIA GPU of compute capability 8.9 or newer, and CUDA 12.1 or newer.
    """
    if not paddle.is_compiled_with_cuda() or not paddle.get_device().startswith("gpu"):
        return False
    cuda = [int(number) for number in re.findall(r"\d+", paddle.version.cuda())]  # "False" for other vendors
    return cuda >= [12, 1] and paddle.device.cuda.get_device_capability() >= (8, 9)


# How the C library treats freed memory; on a CPU it holds the tensors.

# glibc's <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_KEPT_FREE_BYTES = 2**31 - 1  # the largest value mallopt takes
_GROWTH_BYTES = 64 << 20


def keep_freed_memory() -> bool:
    """Make the process keep freed memory for its next tensors; return whether the C library supports it (glibc).

    By default glibc asks the kernel for every block above 32 MB and returns it when it is freed, and the kernel clears
    each page again. Training frees and allocates the same large blocks at every step: with ERNIE-4.5-0.3B's shapes this
    takes 15 to 30% of the step. Peak memory grows by a tenth to a fifth, through gaps between blocks. All threads
    (`threads.py`) share one arena, because memory kept free in one arena is not available to the others.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = (
        (_M_MMAP_MAX, 0),
        (_M_TRIM_THRESHOLD, _KEPT_FREE_BYTES),
        (_M_TOP_PAD, _GROWTH_BYTES),
        (_M_ARENA_MAX, 1),
    )
    return all(mallopt(option, value) == 1 for option, value in settings)

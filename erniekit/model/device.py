"""Which device Paddle computes on, and what it can do."""

from __future__ import annotations

import ctypes
import os
import platform
import re

import paddle

from erniekit.errors import ConfigurationError

GIVEN_GPU = "FLAGS_selected_gpus"  # the variable by which launchers give every rank its own


def use_device(wanted: str) -> str:
    """Select "auto" (a GPU where there is one), "cpu", "gpu" or "gpu:<n>".

    One of several ranks has the GPU that its launcher has given it.

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
        raise ConfigurationError(f"device: {wanted}: this machine has {gpus} GPUs{build}. Write device: cpu or auto")
    paddle.device.set_device(wanted)
    return wanted


def has_flashmask_kernel() -> bool:
    """Whether the current device runs Paddle's `flashmask_attention` (NVIDIA, compute capability 8.0 or newer)."""
    if not paddle.is_compiled_with_cuda() or not paddle.get_device().startswith("gpu"):
        return False
    return paddle.device.cuda.get_device_capability()[0] >= 8


def has_fp8_products() -> bool:
    """Whether the current device, and this build of Paddle, multiply 8-bit floats.

    That is NVIDIA's from compute capability 8.9 on, with CUDA 12.1 or newer.
    """
    if not paddle.is_compiled_with_cuda() or not paddle.get_device().startswith("gpu"):
        return False
    cuda = [int(number) for number in re.findall(r"\d+", paddle.version.cuda())]  # "False" of other makers
    return cuda >= [12, 1] and paddle.device.cuda.get_device_capability() >= (8, 9)


# How the C library treats freed memory, which on a CPU is where tensors live.

# glibc's <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_KEPT_FREE_BYTES = 2**31 - 1  # the largest value mallopt takes
_GROWTH_BYTES = 64 << 20


def keep_freed_memory() -> bool:
    """Make the process keep freed memory for its next tensors; returns whether the C library can (glibc).

    By default glibc asks the kernel for every block above 32 MB and returns it when it is freed, and the kernel clears
    each page again. Training frees and takes the same large blocks at every step: with ERNIE-4.5-0.3B's shapes this
    spends 15 to 30% of the step. Peak memory grows by a tenth to a fifth, through gaps between blocks. All threads
    (`threads.py`) take memory from one place: what is kept free for one would be kept from the others.
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

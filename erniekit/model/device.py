"""Which device Paddle computes on, and what it can do."""

from __future__ import annotations

import os
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

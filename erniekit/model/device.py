"""Select the device, and query its capabilities."""

from __future__ import annotations

import os
import re

import paddle

from erniekit.config.values import other_device
from erniekit.errors import ConfigurationError

GIVEN_DEVICE = "FLAGS_selected_{}s"  # launchers set this variable to each rank's GPU, or other device


def use_device(wanted: str) -> str:
    """Select "auto" (a GPU if there is one), "cpu", "gpu", "gpu:<n>", or another device of Paddle's such as "npu".

    A rank of a launched job uses the device that the launcher assigned to it.

    Returns:
        "cpu", "gpu:<n>" or "<other>:<n>".

    Raises:
        ConfigurationError: this machine, or this build of Paddle, does not have the device.
    """
    gpus = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    if wanted == "auto":
        wanted = "gpu" if gpus else "cpu"
    if other_device(wanted):
        _check_other_device(wanted)
    if wanted != "cpu" and ":" not in wanted:
        wanted = f"{wanted}:{os.environ.get(GIVEN_DEVICE.format(wanted), '0').partition(',')[0]}"
    if wanted.startswith("gpu:") and int(wanted.removeprefix("gpu:")) >= gpus:
        build = "" if paddle.is_compiled_with_cuda() else "; this is a CPU build of Paddle (see README.md, 'On a GPU')"
        raise ConfigurationError(f"device: {wanted}: this machine has {gpus} GPUs{build}. Set device: cpu or auto")
    paddle.device.set_device(wanted)
    return wanted


def _check_other_device(wanted: str) -> None:
    """Raise ConfigurationError if this build of Paddle does not know a device that is neither a CPU nor a GPU."""
    kind = other_device(wanted)
    known = paddle.device.get_all_custom_device_type()
    if kind in known or (kind == "xpu" and paddle.is_compiled_with_xpu()):
        return
    build = "PaddlePaddle built for XPU" if kind == "xpu" else f"PaddlePaddle with its plug-in for {kind}"
    raise ConfigurationError(
        f"device: {wanted}: this PaddlePaddle ({paddle.__version__}) knows no {kind}: install {build}, or set device: "
        "cpu or auto"
    )


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

"""Which device Paddle computes on."""

from __future__ import annotations

import paddle

from erniekit.errors import ConfigurationError


def use_device(wanted: str) -> str:
    """Select "auto" (a GPU where there is one), "cpu", "gpu" or "gpu:<n>".

    Returns:
        "cpu" or "gpu:<n>".

    Raises:
        ConfigurationError: this machine, or this build of Paddle, does not have the device.
    """
    gpus = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    if wanted == "auto":
        wanted = "gpu:0" if gpus else "cpu"
    if wanted == "gpu":
        wanted = "gpu:0"
    if wanted.startswith("gpu:") and int(wanted.removeprefix("gpu:")) >= gpus:
        build = "" if paddle.is_compiled_with_cuda() else "; this is a CPU build of Paddle (see README.md, 'On a GPU')"
        raise ConfigurationError(f"device: {wanted}: this machine has {gpus} GPUs{build}. Write device: cpu or auto")
    paddle.device.set_device(wanted)
    return wanted

"""Use Paddle's fused GPU kernels instead of our functions if the user asks for them (`fuse_...`).

The choice is global to the process, like the device. On a CPU Paddle has only the one of SwiGLU; for the others our
functions run there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import paddle
import paddle.incubate.nn.functional as fused_functions
import paddle.nn.functional as F


@dataclass(frozen=True)
class FusedKernels:
    """The fused kernels to use."""

    rope: bool = False
    linear: bool = False
    rms_norm: bool = False
    swiglu: bool = False

    def __str__(self) -> str:
        return ", ".join(field.name for field in fields(self) if getattr(self, field.name)) or "none"


_chosen = FusedKernels()


def use_fused_kernels(wanted: FusedKernels) -> FusedKernels:
    """Use these kernels from now on; return those that the current device has."""
    global _chosen
    _chosen = wanted if paddle.get_device().startswith("gpu") else replace(FusedKernels(), swiglu=wanted.swiglu)
    return _chosen


def fused_kernels() -> FusedKernels:
    """Return the kernels in use."""
    return _chosen


def linear(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor | None) -> paddle.Tensor:
    """Compute x W + b. Without a bias there is nothing to fuse."""
    if _chosen.linear and bias is not None:
        return fused_functions.fused_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def fused_rms_norm(x: paddle.Tensor, weight: paddle.Tensor, epsilon: float) -> paddle.Tensor:
    """Compute `norm.rms_norm` of x [..., H] with the fused kernel."""
    return fused_functions.fused_rms_norm_ext(x, weight, epsilon)[0]


def fused_swiglu(gate: paddle.Tensor, up: paddle.Tensor) -> paddle.Tensor:
    """Compute `mlp.swiglu` with the fused kernel."""
    return F.swiglu(gate, up)


def fused_rotary(
    x_TND: paddle.Tensor, cos_TD: paddle.Tensor, sin_TD: paddle.Tensor, interleaved: bool
) -> paddle.Tensor:
    """Compute `rope.apply_rotary` with the fused kernel; all tokens form one row, and the tables give each token's
    angles.

    The computation is in float32 whatever the model's precision, as in `rope`.
    """
    tokens, _, size = x_TND.shape
    rotated, _, _ = fused_functions.fused_rotary_position_embedding(
        x_TND.astype("float32").unsqueeze(0),
        sin=sin_TD.reshape([1, tokens, 1, size]),
        cos=cos_TD.reshape([1, tokens, 1, size]),
        use_neox_rotary_style=interleaved,  # Paddle's name for pairs of neighbours
    )
    return rotated.squeeze(0).astype(x_TND.dtype)

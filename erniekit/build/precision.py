"""Select the fused kernels (section 1.7) and the mixed precision (section 1.8) of a GPU."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from erniekit.config import Config
from erniekit.config.registry import did_you_mean

if TYPE_CHECKING:
    from erniekit.model.decoder import Decoder
    from erniekit.model.mixed_precision import MixedPrecision

logger = logging.getLogger(__name__)


def choose_kernels(config: Config) -> None:
    """Compute with Paddle's fused kernels where the configuration asks for them and the device has them."""
    from erniekit.model.kernels import FusedKernels, use_fused_kernels

    section = config.acceleration
    chosen = use_fused_kernels(
        FusedKernels(section.fuse_rope, section.fuse_linear, section.fuse_rms_norm, section.fuse_swiglu)
    )
    if chosen != FusedKernels():
        logger.info(f"fused kernels: {chosen}")


def mixed_precision(config: Config) -> MixedPrecision | None:
    """Return the mixed precision of section 1.8 on the current device; None where it computes in float32."""
    import paddle

    from erniekit.model.mixed_precision import MixedPrecision

    section = config.precision
    if not (section.bf16 or section.fp16) or not paddle.get_device().startswith("gpu"):
        return None
    return MixedPrecision(
        "bfloat16" if section.bf16 else "float16",
        "O2" if section.fp16_opt_level == "O2" else "O1",
        section.amp_custom_white_list,
        section.amp_custom_black_list,
        section.amp_master_grad,
    )


def apply_mixed_precision(config: Config, model: Decoder, log_level: int = logging.INFO) -> None:
    """Make a model compute in 16 bits if the configuration asks for it and the device is a GPU.

    Log which fused kernels have no effect on this model, and which operators of the lists are unknown.
    """
    from erniekit.model.kernels import fused_kernels
    from erniekit.model.linear import Linear

    biases = (layer.bias for layer in model.sublayers() if isinstance(layer, Linear))
    if fused_kernels().linear and all(bias is None for bias in biases):
        logger.log(log_level, "`fuse_linear` has no effect: no linear layer of this model has a bias")
    precision = mixed_precision(config)
    if precision is not None:
        for line in unknown_operators(config):
            logger.log(log_level, line)
        precision.apply_to(model)
        logger.log(log_level, f"mixed precision: {precision}")


def unknown_operators(config: Config) -> list[str]:
    """Return a line for each operator in `amp_custom_white_list` and `amp_custom_black_list` that Paddle lacks."""
    from paddle.base import core
    from paddle.base.framework import OpProtoHolder

    known = [*core._get_all_register_op_kernels("all"), *OpProtoHolder.instance().op_proto_map]
    return [
        f"`{name}` ({config.origin(name)}): {word} has no effect: this Paddle has no operator of that name"
        + did_you_mean(word, known)
        for name in ("amp_custom_white_list", "amp_custom_black_list")
        for word in config[name]
        if word not in known
    ]


def initial_loss_scale(config: Config) -> float | None:
    """Return `scale_loss` if the run computes in float16, else None."""
    precision = mixed_precision(config)
    return float(config.precision.scale_loss) if precision is not None and precision.dtype == "float16" else None

"""Select the fused kernels (section 1.7) and the mixed precision (section 1.8) of a device."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from erniekit.config import Config
from erniekit.config.registry import did_you_mean
from erniekit.config.sections.checkpoint import MASTER_WEIGHT_FLAGS, reason_ignored

if TYPE_CHECKING:
    from erniekit.model.cpu_precision import CpuBFloat16
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


def mixed_precision(config: Config) -> MixedPrecision | CpuBFloat16 | None:
    """Return the mixed precision of section 1.8 on the current device; None where it computes in float32."""
    import paddle

    from erniekit.model.cpu_precision import CpuBFloat16, chosen_products
    from erniekit.model.mixed_precision import MixedPrecision

    section, device = config.precision, paddle.get_device()
    white, black = section.amp_custom_white_list, section.amp_custom_black_list
    if device.startswith("gpu") and (section.bf16 or section.fp16):
        return MixedPrecision(
            "bfloat16" if section.bf16 else "float16",
            "O2" if section.fp16_opt_level == "O2" else "O1",
            white,
            black,
            section.amp_master_grad,
        )
    if device != "cpu" or not section.bf16 or why_not_on_this_cpu(config):
        return None
    products = chosen_products(black)
    rounded = section.fp16_opt_level == "O2" and not section.amp_master_grad
    return CpuBFloat16(products, rounded) if products else None


def why_not_on_this_cpu(config: Config) -> str:
    """Return why `bf16: true` computes in float32 on this CPU; "" if it computes in bfloat16."""
    from erniekit.model import bf16

    is_faster, sentence = bf16.is_faster()
    return "" if is_faster or config.precision.cpu_bf16 == "always" else sentence


def apply_mixed_precision(config: Config, model: Decoder, log_level: int = logging.INFO) -> None:
    """Make a model compute in 16 bits if the configuration asks for it and the device can.

    Log the precision, why `bf16: true` computes in float32, which fused kernels have no effect on this model, and which
    operators of the lists have none.
    """
    from erniekit.model.kernels import fused_kernels
    from erniekit.model.linear import Linear

    biases = (layer.bias for layer in model.sublayers() if isinstance(layer, Linear))
    if fused_kernels().linear and all(bias is None for bias in biases):
        logger.log(log_level, "`fuse_linear` has no effect: no linear layer of this model has a bias")
    precision = mixed_precision(config)
    lines = [] if precision is None else unknown_operators(config)
    for line in [*lines, *_of_bfloat16_on_a_cpu(config)]:
        logger.log(log_level, line)
    if precision is not None:
        precision.apply_to(model)
        logger.log(log_level, f"mixed precision: {precision}")


def _of_bfloat16_on_a_cpu(config: Config) -> list[str]:
    """Return a line for each value of section 1.8 that changes nothing on a CPU with `bf16: true`, which is another
    question than in `Config.ignored_on_cpu`: the processor answers it."""
    import paddle

    from erniekit.model import bf16
    from erniekit.model.cpu_precision import without_effect

    if paddle.get_device() != "cpu" or not config.precision.bf16:
        return []
    if why := why_not_on_this_cpu(config):
        also = "`cpu_bf16: always` computes in bfloat16 all the same"
        return [f"`bf16: true` ({config.origin('bf16')}) has no effect here: fp32 runs ({why}; {also})"]
    is_faster, sentence = bf16.is_faster()
    lines = [] if is_faster else [f"`cpu_bf16: always` ({config.origin('cpu_bf16')}) is slow here: {sentence}"]
    white, black = (f"`{name}` ({config.origin(name)})" for name in ("amp_custom_white_list", "amp_custom_black_list"))
    if config.precision.amp_custom_white_list:
        lines.append(f"{white} has no effect on a CPU: all that can compute in bfloat16 there, products, does")
    if idle := without_effect(config.precision.amp_custom_black_list):
        lines.append(
            f"{black}: {', '.join(idle)} has no effect on a CPU, where all but products is float32: `matmul` and, of "
            "the head, `softmax_with_cross_entropy`"
        )
    flags = config.checkpoint.unified_checkpoint_config
    for flag in MASTER_WEIGHT_FLAGS:
        if flag in flags and not reason_ignored(config, flag):
            origin = config.origin("unified_checkpoint_config")
            lines.append(f"`unified_checkpoint_config` ({origin}): {flag} has no effect: weights are float32 on a CPU")
    if mixed_precision(config) is None:
        lines.append(f"{black}: fp32 runs: no product is left")
    return lines


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


def forward_precision(config: Config) -> str:
    """Return what of the precision changes the values of a forward pass, the same text in every process; "": float32
    computes."""
    from erniekit.model.cpu_precision import CpuBFloat16

    precision = mixed_precision(config)
    if isinstance(precision, CpuBFloat16):
        return "bfloat16 products: " + ", ".join(sorted(precision.products))
    return "" if precision is None else repr(precision)


def precision_identity(config: Config) -> dict[str, str]:
    """Return the precision that a resumed run must have on a CPU to give the same bits; {} for float32."""
    import paddle

    precision = forward_precision(config)
    return {"precision": precision} if precision and paddle.get_device() == "cpu" else {}


def initial_loss_scale(config: Config) -> float | None:
    """Return `scale_loss` if the run computes in float16, else None."""
    precision = mixed_precision(config)
    return float(config.precision.scale_loss) if precision is not None and precision.dtype == "float16" else None


def loss_scale_bounds(config: Config) -> tuple[float, float]:
    """Return the smallest and the largest loss scale of a run in float16."""
    return float(config.precision.min_loss_scale), float(config.precision.max_loss_scale)

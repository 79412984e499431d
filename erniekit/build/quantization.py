"""Build the quantization of linear layers from a configuration. It needs neither Paddle nor NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from erniekit.config import Config
from erniekit.model.quantization.settings import WEIGHT_ONLY, Fp8, Quantization, WeightOnly

PARAMETER = "weight_quantize_algo"


def base_of_adapters(parameters: Mapping[str, Any]) -> WeightOnly | None:
    """Return the quantization of the base weights on which adapters were trained; None for plain float weights.

    Args:
        parameters: the parameters of the run that trained the adapters, as far as they are known.
    """
    algorithm = parameters.get(PARAMETER)
    return WeightOnly(algorithm) if parameters.get("lora") and algorithm in WEIGHT_ONLY else None


def quantization_from(config: Config) -> Quantization | None:
    """Return the quantization of `weight_quantize_algo` and section 2.4; None for plain float weights and products."""
    algorithm, section = config.basic.weight_quantize_algo, config.fp8
    if algorithm in WEIGHT_ONLY:
        return WeightOnly(algorithm)
    if algorithm == "none":
        return None
    return Fp8(
        hadamard_block=section.hadamard_block_size if section.apply_hadamard else 0,
        apply_online_actscale_step=section.apply_online_actscale_step,
        actscale_moving_rate=section.actscale_moving_rate,
        fp8_format_type=section.fp8_format_type,
        quant_input_grad=section.quant_input_grad,
        quant_weight_grad=section.quant_weight_grad,
    )

"""Settings of quantized weights and of FP8 products of linear layers. Needs no Paddle or NumPy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from erniekit.model.architectures.architecture import Architecture
from erniekit.model.quantization.formats import INT4, INT8, NF4, Format

WEIGHT_ONLY = {
    "weight_only_int8": (INT8, INT8),
    "weight_only_int4": (INT4, INT4),
    "weight_only_mix": (INT8, INT4),
    "nf4": (NF4, NF4),
}  # the formats of ordinary linear layers, and of those in routed experts


@dataclass(frozen=True)
class WeightOnly:
    """Quantize the frozen weights of all linear layers."""

    algorithm: str

    def form(self, path: str, architecture: Architecture) -> Format:
        """Return the format of the linear layer with this path."""
        usual, of_experts = WEIGHT_ONLY[self.algorithm]
        return usual if architecture.weight_info(f"{path}.weight").expert is None else of_experts

    def __str__(self) -> str:
        usual, of_experts = WEIGHT_ONLY[self.algorithm]
        return usual.name if usual == of_experts else f"{usual.name}, those of experts {of_experts.name}"


@dataclass(frozen=True)
class Fp8:
    """Compute the products of all linear layers through 8-bit floats; named like the parameters.

    Attributes:
        hadamard_block: block size of the rotation of inputs; 0: no rotation.
    """

    hadamard_block: int = 32
    apply_online_actscale_step: int = 200
    actscale_moving_rate: float = 0.01
    fp8_format_type: str = "hybrid"
    quant_input_grad: bool = False
    quant_weight_grad: bool = False

    def __str__(self) -> str:
        rotated = f"inputs rotated in blocks of {self.hadamard_block}, " if self.hadamard_block else ""
        gradients = [
            name for name, on in (("inputs", self.quant_input_grad), ("weights", self.quant_weight_grad)) if on
        ]
        own = f"gradients of {' and '.join(gradients)} in {self.gradient_format}" if gradients else "exact gradients"
        return f"e4m3, {rotated}{own}"

    @property
    def gradient_format(self) -> str:
        return "e5m2" if self.fp8_format_type == "hybrid" else "e4m3"


Quantization = WeightOnly | Fp8


def rotation_problem(settings: Fp8, inputs: Mapping[str, int]) -> str | None:
    """Return an error text if blocks do not divide the inputs of some linear layers, by path; else None."""
    block = settings.hadamard_block
    wrong = {path.rpartition(".")[2]: size for path, size in inputs.items() if block and size % block}
    if not wrong:
        return None
    what = ", ".join(f"{name} ({size:,} inputs)" for name, size in wrong.items())
    largest = math.gcd(block, *inputs.values())
    advice = f"hadamard_block_size: {largest}, or " if largest > 1 else ""
    return (
        f"hadamard_block_size: blocks of {block} do not divide this rank's inputs of {what}\n"
        f"  set {advice}apply_hadamard: false"
    )

"""2.4 FP8 training."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.parameter import ConfigBuilder, parameter, rule, section, when

WITH_FP8 = when("weight_quantize_algo", "fp8_linear")


@dataclass(frozen=True)
class Fp8Parameters:
    """Training with 8-bit floating-point products, and the memory of the optimizer."""

    apply_hadamard: bool = parameter(
        True,
        "Multiply activations and weights by a Hadamard matrix before they are rounded to FP8. It spreads outliers "
        "over a block and cancels in the product.",
        verbs=("train", "eval"),
        needs=WITH_FP8,
    )
    hadamard_block_size: int = parameter(
        32,
        "The block size of the Hadamard matrix, a power of two. The input size of every linear layer must be a "
        "multiple of it.",
        minimum=2,
        verbs=("train", "eval"),
        needs=WITH_FP8,
        example=64,
    )
    apply_online_actscale_step: int = parameter(
        200,
        "For this many optimizer steps the scale of activations is computed from the largest value of each batch. "
        "Afterwards it is computed from a moving average over earlier steps (see `actscale_moving_rate`), which "
        "evaluation always uses. 0 uses the average from the second step on.",
        minimum=0,
        unit="optimizer steps",
        wrong_type="it counts steps, although the upstream reference calls it a bool; the default is 200",
        needs=WITH_FP8,
        example=50,
    )
    actscale_moving_rate: float = parameter(
        0.01,
        "The weight w of the newest step in the moving average of the largest activations. During the first 1 / w "
        "steps the average is the plain mean of all steps.",
        above=0.0,
        maximum=1.0,
        needs=WITH_FP8,
        example=0.05,
    )
    fp8_format_type: str = parameter(
        "hybrid",
        "The FP8 formats: `hybrid` uses e4m3 in the forward pass and e5m2 for gradients, `e4m3` uses e4m3 for both.",
        choices=("hybrid", "e4m3"),
        needs=(when("quant_input_grad"), when("quant_weight_grad")),
    )
    quant_input_grad: bool = parameter(
        False,
        "Compute the gradient of the input of linear layers in FP8 as well.",
        needs=WITH_FP8,
    )
    quant_weight_grad: bool = parameter(
        False,
        "Compute the gradient of the weight of linear layers in FP8 as well.",
        needs=WITH_FP8,
    )
    use_lowprecision_moment: bool = parameter(
        False,
        "Store AdamW's moments in bfloat16, which takes half the memory. Each step updates the weights with the "
        "float32 moments and then rounds the moments to nearest; losses change a little.",
        example=True,
    )
    tensorwise_offload_optimizer: bool = parameter(
        False,
        "Offload the optimizer states as `offload_optim` does, with the moments of at most one tensor in memory at any "
        "time: on a CPU the pages of the memory-mapped file are released as soon as a tensor has been updated. Losses "
        "stay the same.",
        example=True,
    )
    optim_shard_num: int = parameter(
        1,
        "Write the optimizer states of each rank as this many files. More files need less memory while saving.",
        minimum=1,
        unit="files",
        needs=when("unified_checkpoint_config", "ignore_merge_optimizer"),
        example=8,
    )


@rule("hadamard_block_size")
def block_is_a_power_of_two(builder: ConfigBuilder) -> None:
    """`hadamard_block_size` is a power of two."""
    size = builder["hadamard_block_size"]
    if size & (size - 1):
        builder.problem("hadamard_block_size", f"{size} is not a power of two", "write 32, 64 or 128")


@rule("hadamard_block_size", "apply_hadamard", "weight_quantize_algo")
def blocks_are_of_the_rotation(builder: ConfigBuilder) -> None:
    """`hadamard_block_size` has no effect without `apply_hadamard`."""
    if builder.is_set("hadamard_block_size") and WITH_FP8.holds(builder) and not builder["apply_hadamard"]:
        builder.no_effect("hadamard_block_size", "without `apply_hadamard`")


SECTION = section(
    Fp8Parameters,
    key="fp8",
    title="2.4 FP8 training",
    verbs=("train",),
    rules=(block_is_a_power_of_two, blocks_are_of_the_rotation),
)

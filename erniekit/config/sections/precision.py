"""1.8 Mixed precision."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.parameter import CPU_ONLY, GPU_ONLY, ConfigBuilder, parameter, rule, section, shorthand, when
from erniekit.config.values import WORDS

FUSED_GRADIENT_FLAGS = (
    "split_param",
    "enable_stage1_tensor_fusion",
)  # flags of sharding with which fleet stores the gradients
WITH_AMP = (when("bf16"), when("fp16"))


@dataclass(frozen=True)
class PrecisionParameters:
    """The number formats that a run computes in. On a CPU matrix products can compute in bfloat16."""

    bf16: bool = parameter(
        False,
        "Compute in bfloat16, which has the range of float32 and 8 bits of precision. On a CPU the products of linear "
        "layers, experts and the head round their factors to bfloat16 and sum in float32; all else is float32.",
        excludes=("fp16",),
        example=True,
    )
    cpu_bf16: str = parameter(
        "auto",
        "What `bf16: true` does on a CPU. `auto` computes in bfloat16 where the processor multiplies it faster than "
        "float32 (AVX512-BF16 of AMD, AMX of Intel), and in float32 elsewhere, which the run tells. `always` rounds "
        "to bfloat16 on every processor, if slowly, so that a run means the same on all of them.",
        choices=("auto", "always"),
        needs=when("bf16"),
        devices=CPU_ONLY,
    )
    fp16: bool = parameter(
        False,
        "Compute in float16, which has 11 bits of precision and a small range, so that the loss must be scaled (see "
        "`scale_loss`). A CPU computes in float32 instead, and `bf16` is its 16-bit format.",
        excludes=("bf16",),
        devices=GPU_ONLY,
    )
    fp16_opt_level: str = parameter(
        "O1",
        "The level of mixed precision, for bfloat16 as well. `O1` keeps the parameters in float32 and casts the inputs "
        "of the operators that are faster in 16 bits. `O2` stores the parameters in 16 bits, with float32 master "
        "weights in the optimizer. A CPU keeps the parameters in float32 at both levels; at `O2` it rounds the "
        "gradients to 16 bits, unless `amp_master_grad` is set.",
        choices=("O1", "O2"),
        needs=WITH_AMP,
    )
    scale_loss: int = parameter(
        2**15,
        "The initial value of the dynamic loss scale, which keeps small gradients from underflow in float16. A step "
        "whose gradients overflow is skipped and the scale is halved; after 2,000 steps without overflow the scale is "
        "doubled, within `min_loss_scale` and `max_loss_scale`. The run stops with advice when gradients overflow at a "
        "scale of 1.",
        minimum=1,
        needs=when("fp16"),
        devices=GPU_ONLY,
        example="2 ** 13",
    )
    min_loss_scale: int = parameter(
        1,
        "The smallest loss scale. Above 1, a step whose gradients overflow at it is skipped with a warning, and after "
        "20 such steps in a row the run stops with advice.",
        minimum=1,
        needs=when("fp16"),
        devices=GPU_ONLY,
        example="2 ** 5",
    )
    max_loss_scale: int = parameter(
        2**24,
        "The largest loss scale. A model whose gradients overflow again and again as the scale is doubled needs a "
        "smaller one.",
        minimum=1,
        needs=when("fp16"),
        devices=GPU_ONLY,
        example="2 ** 20",
    )
    amp_custom_white_list: tuple[str, ...] = parameter(
        (),
        "Operators to compute in 16 bits in addition to Paddle's list (`paddle.amp.white_list()`), by Paddle's names, "
        "such as `matmul_v2` or `flash_attn`; an unknown name is told. Faster where an operator is called often; check "
        "the loss, since sums and exponentials lose digits. On a CPU only products compute in bfloat16, all of "
        "them, so the list is reported as without effect.",
        kind=WORDS,
        needs=WITH_AMP,
        example="lookup_table flash_attn matmul",
    )
    amp_custom_black_list: tuple[str, ...] = parameter(
        (),
        "Operators to compute in float32 in addition to Paddle's list (`paddle.amp.black_list()`), by Paddle's names, "
        "such as `reduce_sum` or `elementwise_div`; an unknown name is told. Name what makes the loss NaN in 16 bits. "
        "Each casts its inputs, which takes time and memory. The final norm and routers are always float32, and on a "
        "GPU the head. On a CPU `matmul` stands for all products, and `softmax_with_cross_entropy` for the head's; the "
        "run tells which names have no effect there.",
        kind=WORDS,
        needs=WITH_AMP,
        example="reduce_sum elementwise_div",
    )
    amp_master_grad: bool = parameter(
        False,
        "Keep gradients in float32 although parameters are stored in 16 bits, so that accumulating and clipping keep "
        "full precision.",
        needs=when("fp16_opt_level", "O2"),
    )


@rule("amp_master_grad", "sharding", "sharding_parallel_config", "sharding_parallel_degree", "fp16_opt_level")
def gradients_have_one_type(builder: ConfigBuilder) -> None:
    """`amp_master_grad` casts gradients to float32 after each backward pass, so it excludes `sharding` in `stage2` and
    `stage3`, and in `stage1` with `split_param` or `enable_stage1_tensor_fusion`: these accumulate gradients in the
    16-bit dtype of the weights."""
    if builder["sharding_parallel_degree"] == 1 or not (
        builder["amp_master_grad"] and builder["fp16_opt_level"] == "O2"
    ):
        return
    flags = [flag for flag in FUSED_GRADIENT_FLAGS if flag in builder["sharding_parallel_config"]]
    if builder["sharding"] == "stage1" and not flags:
        return
    what = f"`sharding: {builder['sharding']}`" + "".join(f" with `{flag}`" for flag in flags[:1])
    builder.problem(
        "amp_master_grad",
        f"float32 gradients are not possible with {what}, which accumulates gradients in 16 bits",
        "write `amp_master_grad: false`, or `sharding: stage1` without these flags",
    )


@rule("scale_loss", "min_loss_scale", "max_loss_scale", "fp16")
def the_scale_is_within_its_bounds(builder: ConfigBuilder) -> None:
    """`min_loss_scale` is at most `scale_loss`, and that at most `max_loss_scale`."""
    if not builder["fp16"]:
        return
    least, first, most = (builder[name] for name in ("min_loss_scale", "scale_loss", "max_loss_scale"))
    if first > most and not builder.is_set("max_loss_scale"):
        builder.derive("max_loss_scale", first, "as scale_loss")
        return
    if not least <= first <= most:
        what = f"the scale begins at {first:,}, outside of its bounds, {least:,} to {most:,}"
        builder.problem("scale_loss", what, "change it, `min_loss_scale` or `max_loss_scale`")


@rule("amp_custom_white_list", "amp_custom_black_list")
def an_operator_is_in_one_list(builder: ConfigBuilder) -> None:
    """No operator stands in both `amp_custom_white_list` and `amp_custom_black_list`."""
    both = [name for name in builder["amp_custom_white_list"] if name in builder["amp_custom_black_list"]]
    if both:
        what = f"{', '.join(both)}: also in `amp_custom_white_list`, and an operator computes in one format"
        builder.problem("amp_custom_black_list", what, "remove it from one of the two lists")


SECTION = section(
    PrecisionParameters,
    key="precision",
    title="1.8 Mixed precision",
    verbs=("train", "eval"),
    rules=(gradients_have_one_type, the_scale_is_within_its_bounds, an_operator_is_in_one_list),
    aliases=(
        shorthand(
            "compute_type",
            "A shorthand for the number format. The weight formats `fp8`, `wint8` and `wint4/8` compute in bfloat16.",
            {
                "fp32": {"bf16": False, "fp16": False},
                "bf16": {"bf16": True, "fp16": False},
                "fp16": {"bf16": False, "fp16": True},
                "fp8": {"bf16": True, "fp16": False, "weight_quantize_algo": "fp8_linear"},
                "wint8": {"bf16": True, "fp16": False, "weight_quantize_algo": "weight_only_int8"},
                "wint4/8": {"bf16": True, "fp16": False, "weight_quantize_algo": "weight_only_mix"},
            },
        ),
    ),
)

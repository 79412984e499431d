"""1.8 Mixed precision."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.parameter import GPU_ONLY, ConfigBuilder, parameter, rule, section, shorthand, when
from erniekit.config.values import WORDS

FUSED_GRADIENT_FLAGS = (
    "split_param",
    "enable_stage1_tensor_fusion",
)  # words of sharding with which fleet keeps gradients itself
WITH_AMP = (when("bf16"), when("fp16"))


@dataclass(frozen=True)
class PrecisionParameters:
    """Which number formats a GPU computes in. A CPU always computes in float32."""

    bf16: bool = parameter(
        False,
        "Compute in bfloat16, which has the range of float32 and 8 bits of precision.",
        excludes=("fp16",),
        devices=GPU_ONLY,
        example=True,
    )
    fp16: bool = parameter(
        False,
        "Compute in float16, which has 11 bits of precision and a small range, so that the loss must be scaled (see "
        "`scale_loss`).",
        excludes=("bf16",),
        devices=GPU_ONLY,
    )
    fp16_opt_level: str = parameter(
        "O1",
        "How far mixed precision goes, for bfloat16 as well: `O1` keeps the parameters in float32 and casts around the "
        "operators that gain from it; `O2` holds the parameters in 16 bits with float32 copies in the optimizer.",
        choices=("O1", "O2"),
        needs=WITH_AMP,
        devices=GPU_ONLY,
    )
    scale_loss: int = parameter(
        2**15,
        "The first value of the dynamic loss scale, which keeps small gradients from vanishing in float16. A step "
        "whose gradients overflow is skipped and the scale halved; after 2,000 steps without any it is doubled. "
        "Where gradients overflow at a scale of 1 the run stops, with advice.",
        minimum=1,
        needs=when("fp16"),
        devices=GPU_ONLY,
        example="2 ** 13",
    )
    amp_custom_white_list: tuple[str, ...] = parameter(
        (),
        "Operators that are computed in 16 bits in addition to Paddle's own list.",
        kind=WORDS,
        needs=WITH_AMP,
        devices=GPU_ONLY,
        example="lookup_table flash_attn matmul",
    )
    amp_custom_black_list: tuple[str, ...] = parameter(
        (),
        "Operators that are computed in float32 in addition to Paddle's own list.",
        kind=WORDS,
        needs=WITH_AMP,
        devices=GPU_ONLY,
        example="reduce_sum elementwise_div",
    )
    amp_master_grad: bool = parameter(
        False,
        "Keep gradients in float32 where parameters are held in 16 bits, so that accumulating and clipping lose "
        "nothing.",
        needs=when("fp16_opt_level", "O2"),
        devices=GPU_ONLY,
    )


@rule("amp_master_grad", "sharding", "sharding_parallel_config", "sharding_parallel_degree", "fp16_opt_level")
def gradients_have_one_type(builder: ConfigBuilder) -> None:
    """`amp_master_grad` widens gradients after each backward pass; fleet's sharding in stage 2 or 3, and its buffers in
    stage 1 (`split_param`, `enable_stage1_tensor_fusion`), add them up in the type of the weights before that."""
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
        f"float32 gradients do not go with {what}, which adds gradients up in the 16 bits of the weights",
        "write `amp_master_grad: false`, or `sharding: stage1` without these words",
    )


SECTION = section(
    PrecisionParameters,
    key="precision",
    title="1.8 Mixed precision",
    verbs=("train", "eval"),
    rules=(gradients_have_one_type,),
    aliases=(
        shorthand(
            "compute_type",
            "One word for a number format. Weight formats (`fp8`, `wint8`, `wint4/8`) come with bfloat16 arithmetic.",
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

"""Rules for the flags of `pipeline_parallel_config`, `sharding_parallel_config` and `tensor_parallel_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from erniekit.config.parameter import ConfigBuilder, rule

PIPELINE_FLAGS = (
    "disable_p2p_cache_shape",
    "disable_partial_send_recv",
    "disable_batch_p2p_comm",
    "disable_non_batch_p2p_comm",
    "enable_delay_scale_loss",
    "enable_dp_comm_overlap",
    "enable_sharding_comm_overlap",
    "enable_overlap_p2p_comm",
    "enable_clear_every_step_cache",
    "enable_release_grads",
    "enable_split_backward",
    "enable_timer",
    "best_unbalanced_scheduler",
)
_REDUCED_ONCE = "gradients are reduced once, after the last micro-batch, and fleet's overlap would average them"
# Flags that never have an effect, with the reason.
IGNORED_PIPELINE_FLAGS = {
    "enable_delay_scale_loss": "the loss is divided by the tokens or pairs of a step, not by its micro-batches",
    "enable_dp_comm_overlap": _REDUCED_ONCE,
    "enable_sharding_comm_overlap": _REDUCED_ONCE,
}
ONLY_INTERLEAVED = ("enable_overlap_p2p_comm", "best_unbalanced_scheduler")


@rule("pipeline_parallel_config", "pipeline_parallel_degree", "virtual_pp_degree", "tensor_parallel_degree")
def pipeline_flags(builder: ConfigBuilder) -> None:
    """Flags of `pipeline_parallel_config` that contradict each other or the layout are refused; flags without effect
    are reported. `enable_release_grads` sets `release_grads`."""
    flags = set(builder["pipeline_parallel_config"])
    if builder["pipeline_parallel_degree"] == 1 or not flags:
        return
    for what, write in _contradictions(flags, interleaved=builder["virtual_pp_degree"] > 1):
        builder.problem("pipeline_parallel_config", what, write)
    for flag, why in _ignored_flags(builder, flags):
        builder.messages.append(
            f"`pipeline_parallel_config` ({builder.origins['pipeline_parallel_config']}): {flag} has no effect: {why}"
        )
    if "enable_release_grads" in flags:
        builder.derive("release_grads", True, "(enable_release_grads)")


def _contradictions(flags: set[str], *, interleaved: bool) -> list[tuple[str, str]]:
    """Return pairs of a contradiction and its correction."""
    found = []
    if "enable_split_backward" in flags:
        what = "enable_split_backward: Paddle's fleet has no schedule whose backward passes are split (zero bubble)"
        found.append((what, "leave it out; virtual_pp_degree shrinks the pipeline bubble"))
    if interleaved and "disable_p2p_cache_shape" in flags:
        what = "disable_p2p_cache_shape: an interleaved pipeline (virtual_pp_degree above 1) must know the shapes"
        found.append((what, "leave it out, or write virtual_pp_degree: 1"))
    if {"disable_batch_p2p_comm", "disable_non_batch_p2p_comm"} <= flags:
        what = "disable_batch_p2p_comm and disable_non_batch_p2p_comm together leave no way to send tensors"
        found.append((what, "leave one of them out"))
    if {"enable_overlap_p2p_comm", "disable_non_batch_p2p_comm"} <= flags:
        what = "enable_overlap_p2p_comm needs communication without batches, which disable_non_batch_p2p_comm forbids"
        found.append((what, "leave one of them out"))
    return found


def _ignored_flags(builder: ConfigBuilder, flags: set[str]) -> list[tuple[str, str]]:
    found = [(flag, why) for flag, why in IGNORED_PIPELINE_FLAGS.items() if flag in flags]
    if builder["virtual_pp_degree"] == 1:
        why = "only interleaved pipelines use it, and virtual_pp_degree is 1"
        found += [(flag, why) for flag in ONLY_INTERLEAVED if flag in flags]
    if "disable_partial_send_recv" in flags and builder["tensor_parallel_degree"] == 1:
        found.append(("disable_partial_send_recv", "tensor_parallel_degree is 1, so full tensors are always sent"))
    elif "disable_partial_send_recv" in flags and builder["sequence_parallel"]:
        found.append(("disable_partial_send_recv", "with sequence_parallel the full local tensors are always sent"))
    return found


@rule("virtual_pp_degree", "pipeline_parallel_degree", "gradient_accumulation_steps")
def enough_micro_batches(builder: ConfigBuilder) -> None:
    """A pipeline needs several micro-batches for each stage; an interleaved one as many as stages, or at least twice
    as many."""
    stages, count = builder["pipeline_parallel_degree"], builder["gradient_accumulation_steps"]
    if builder["virtual_pp_degree"] == 1 and count < stages:
        builder.messages.append(
            f"`gradient_accumulation_steps` is {count}: {stages} pipeline stages wait for each other for "
            f"{(stages - 1) / (count + stages - 1):.0%} of a step; write {4 * stages} or more"
        )
    if builder["virtual_pp_degree"] == 1 or count == stages or count >= 2 * stages:
        return
    fitting = stages if count < stages else 2 * stages
    builder.messages.append(
        f"`gradient_accumulation_steps` is {count}: an interleaved pipeline of {stages} stages runs {fitting} "
        f"micro-batches, so {fitting - count} in every step are computed and discarded; write {fitting}"
    )


@rule("virtual_pp_degree", "pipeline_parallel_degree", "hidden_dropout_prob", "attention_probs_dropout_prob")
def dropout_in_padded_rows(builder: ConfigBuilder) -> None:
    """An interleaved pipeline pads the rows of a step to one length, which changes the masks of dropout."""
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    if (
        builder["pipeline_parallel_degree"] > 1
        and builder["virtual_pp_degree"] > 1
        and any(builder[name] for name in names)
    ):
        builder.messages.append(
            "dropout: an interleaved pipeline pads the rows of a step to one length, so the dropout masks differ from "
            "those of the same run without a pipeline; they are equally random"
        )


PIPELINE_RULES = (pipeline_flags, enough_micro_batches, dropout_in_padded_rows)


# Rules for sharding: the flags of `sharding_parallel_config`, and the layouts that each stage works with.

SHARDING_FLAGS = (
    "enable_stage1_tensor_fusion",
    "enable_stage1_overlap",
    "enable_stage1_allgather_overlap",
    "enable_stage1_broadcast_overlap",
    "enable_stage2_overlap",
    "enable_release_grads",
    "enable_fuse_optimizer_states",
    "disable_stage1_reduce_avg",
    "split_param",
)
_SYNCHRONOUS_ALL_GATHER = (
    "updated weights are gathered at once, because evaluation and saving read them outside their layers"
)
# Flags that never have an effect, with the reason.
IGNORED_SHARDING_FLAGS = {
    "enable_stage1_overlap": "gradients are reduced once, after the last micro-batch; fleet's overlap needs a "
    "gradient of every parameter in every micro-batch, and an expert without tokens has none",
    "enable_stage1_allgather_overlap": _SYNCHRONOUS_ALL_GATHER,
    "enable_stage1_broadcast_overlap": _SYNCHRONOUS_ALL_GATHER,
    "enable_stage2_overlap": "each gradient is freed as soon as it has been sent, so every rank waits for the "
    "communication",
    "enable_fuse_optimizer_states": "it fuses moments for fleet's checkpoints; ERNIEKit writes them tensor by tensor",
    "disable_stage1_reduce_avg": "gradients are always summed, never averaged",
}
LEVEL1_FLAGS = {  # flag -> why it has no effect in the other stages
    "split_param": {
        "stage2": "stage2 assigns full parameters to ranks",
        "stage3": "stage3 always shards every parameter",
    },
    "enable_stage1_tensor_fusion": {
        "stage2": "stage2 sends each gradient as soon as it is computed",
        "stage3": "stage3 gathers the parameters of a layer before it computes",
    },
}


@rule("sharding_parallel_config", "sharding_parallel_degree", "sharding", "release_grads")
def sharding_flags(builder: ConfigBuilder) -> None:
    """Flags of `sharding_parallel_config` without effect are reported. `enable_release_grads` sets `release_grads`."""
    flags, sharding_level = builder["sharding_parallel_config"], builder["sharding"]
    if builder["sharding_parallel_degree"] == 1:
        return
    if "enable_release_grads" in flags:
        builder.derive("release_grads", True, "(enable_release_grads)")
    reasons = IGNORED_SHARDING_FLAGS | {
        flag: why[sharding_level] for flag, why in LEVEL1_FLAGS.items() if sharding_level in why
    }
    if sharding_level == "stage1" and "split_param" in flags:
        reasons["enable_stage1_tensor_fusion"] = "split_param already fuses parameters"
    elif sharding_level == "stage1" and builder["release_grads"]:
        reasons["enable_stage1_tensor_fusion"] = "fused gradients cannot be released"
    for flag in flags:
        if flag in reasons:
            where = builder.origins["sharding_parallel_config"]
            builder.messages.append(f"`sharding_parallel_config` ({where}): {flag} has no effect: {reasons[flag]}")


@rule("sharding", "sharding_parallel_degree", "tensor_parallel_degree", "pipeline_parallel_degree")
def sharding_levels_and_parallelism(builder: ConfigBuilder) -> None:
    """`sharding: stage2` and `stage3` work with data parallelism only; `stage1` works with every layout."""
    others = [name for name in ("tensor_parallel_degree", "pipeline_parallel_degree") if builder[name] > 1]
    if builder["sharding_parallel_degree"] != 1 and builder["sharding"] in ("stage2", "stage3") and others:
        what = (
            f"fleet shards gradients and parameters only across ranks that each hold the full model, but "
            f"{' and '.join(f'{name} is {builder[name]}' for name in others)}"
        )
        builder.problem("sharding", what, "write sharding: stage1, which works with every layout")


SHARDING_RULES = (sharding_flags, sharding_levels_and_parallelism)


def stores_moments(values: Mapping[str, Any]) -> bool:
    """Return whether AdamW's moments are stored apart from Paddle's optimizer, see section 2.4."""
    names = ("use_lowprecision_moment", "offload_optim", "tensorwise_offload_optimizer")
    return any(values[name] for name in names) or values["optim"] == "adamw_custom"


# The flags of `tensor_parallel_config`, and which of them have no effect.

TENSOR_PARALLEL_FLAGS = (
    "enable_mp_async_allreduce",
    "enable_mp_skip_c_identity",
    "enable_mp_fused_linear_param_grad_add",
    "enable_sp_async_reduce_scatter",
    "enable_delay_scale_loss",
    "replace_with_c_embedding",
    "replace_with_parallel_cross_entropy",
    "sync_param",
    "sync_grad",
    "sync_moment",
)
_FLEET_LINEARS_ONLY = (
    "only fleet's linear layers use it; ERNIEKit has one linear layer with and without tensor parallelism"
)
# Flags that never have an effect, with the reason.
IGNORED_TENSOR_PARALLEL_FLAGS = {
    "enable_mp_async_allreduce": _FLEET_LINEARS_ONLY,
    "enable_mp_fused_linear_param_grad_add": _FLEET_LINEARS_ONLY,
    "enable_sp_async_reduce_scatter": _FLEET_LINEARS_ONLY,
    "enable_delay_scale_loss": "the loss is divided by the tokens or pairs of a step, not by its micro-batches",
    "replace_with_c_embedding": "the embedding table is always sharded by vocabulary",
    "replace_with_parallel_cross_entropy": "tensor_parallel_output decides whether the logits stay sharded",
}


@rule(
    "tensor_parallel_config", "tensor_parallel_degree", "sequence_parallel", "optim", "use_lowprecision_moment",
    "offload_optim", "tensorwise_offload_optimizer",
)  # fmt: skip
def tensor_parallel_flags(builder: ConfigBuilder) -> None:
    """Flags of `tensor_parallel_config` without effect are reported."""
    if builder["tensor_parallel_degree"] == 1:
        return
    reasons = dict(IGNORED_TENSOR_PARALLEL_FLAGS)
    if builder["sequence_parallel"]:
        reasons["enable_mp_skip_c_identity"] = "with sequence_parallel tokens are gathered, which copies them anyway"
    if stores_moments(builder):
        reasons["sync_moment"] = (
            "moments in bfloat16, offloaded or of adamw_custom are not broadcast; the ranks of a tensor-parallel group "
            "compute equal moments without it, too"
        )
    for flag in builder["tensor_parallel_config"]:
        if flag in reasons:
            where = builder.origins["tensor_parallel_config"]
            builder.messages.append(f"`tensor_parallel_config` ({where}): {flag} has no effect: {reasons[flag]}")

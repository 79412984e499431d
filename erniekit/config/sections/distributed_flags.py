"""Rules of pipelines: the words of `pipeline_parallel_config` that act, change nothing or cannot be had, and more."""

from __future__ import annotations

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
_REDUCED_ONCE = "gradients are added up once, after the last micro-batch, and fleet's overlap would average them"
# Words that never change anything here, with the reason.
IGNORED_PIPELINE_FLAGS = {
    "enable_delay_scale_loss": "a loss is divided by what the whole step holds, and never by a number of micro-batches",
    "enable_dp_comm_overlap": _REDUCED_ONCE,
    "enable_sharding_comm_overlap": _REDUCED_ONCE,
}
ONLY_INTERLEAVED = ("enable_overlap_p2p_comm", "best_unbalanced_scheduler")


@rule("pipeline_parallel_config", "pipeline_parallel_degree", "virtual_pp_degree", "tensor_parallel_degree")
def pipeline_flags(builder: ConfigBuilder) -> None:
    """Words of `pipeline_parallel_config` that contradict each other or the layout are refused; those that change
    nothing are told. `enable_release_grads` stands for `release_grads`."""
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
    """What is wrong, and what to write instead."""
    found = []
    if "enable_split_backward" in flags:
        what = "enable_split_backward: Paddle's fleet has no schedule whose backward passes are split (zero bubble)"
        found.append((what, "leave it out; virtual_pp_degree shortens the time in which stages wait"))
    if interleaved and "disable_p2p_cache_shape" in flags:
        what = "disable_p2p_cache_shape: an interleaved pipeline (virtual_pp_degree above 1) must know the shapes"
        found.append((what, "leave it out, or write virtual_pp_degree: 1"))
    if {"disable_batch_p2p_comm", "disable_non_batch_p2p_comm"} <= flags:
        what = "disable_batch_p2p_comm and disable_non_batch_p2p_comm leave stages no way to exchange tensors"
        found.append((what, "leave one of them out"))
    if {"enable_overlap_p2p_comm", "disable_non_batch_p2p_comm"} <= flags:
        what = (
            "enable_overlap_p2p_comm works with exchanges that are not batched, and disable_non_batch_p2p_comm is set"
        )
        found.append((what, "leave one of them out"))
    return found


def _ignored_flags(builder: ConfigBuilder, flags: set[str]) -> list[tuple[str, str]]:
    found = [(flag, why) for flag, why in IGNORED_PIPELINE_FLAGS.items() if flag in flags]
    if builder["virtual_pp_degree"] == 1:
        why = "it belongs to interleaved pipelines, and virtual_pp_degree is 1"
        found += [(flag, why) for flag in ONLY_INTERLEAVED if flag in flags]
    if "disable_partial_send_recv" in flags and builder["tensor_parallel_degree"] == 1:
        found.append(("disable_partial_send_recv", "tensor_parallel_degree is 1, so tensors are sent whole"))
    elif "disable_partial_send_recv" in flags and builder["sequence_parallel"]:
        found.append(("disable_partial_send_recv", "with sequence_parallel tensors are never sent in parts"))
    return found


@rule("virtual_pp_degree", "pipeline_parallel_degree", "gradient_accumulation_steps")
def enough_micro_batches(builder: ConfigBuilder) -> None:
    """An interleaved pipeline wants as many micro-batches as stages, or at least twice as many."""
    stages, count = builder["pipeline_parallel_degree"], builder["gradient_accumulation_steps"]
    if builder["virtual_pp_degree"] == 1 or count == stages or count >= 2 * stages:
        return
    fitting = stages if count < stages else 2 * stages
    builder.messages.append(
        f"`gradient_accumulation_steps` is {count}: an interleaved pipeline of {stages} stages runs {fitting} "
        f"micro-batches, so in every step {fitting - count} are computed that count for nothing; better write {fitting}"
    )


@rule("virtual_pp_degree", "pipeline_parallel_degree", "hidden_dropout_prob", "attention_probs_dropout_prob")
def dropout_in_padded_rows(builder: ConfigBuilder) -> None:
    """An interleaved pipeline pads the rows of a step to one length, which changes the draws of dropout."""
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    if (
        builder["pipeline_parallel_degree"] > 1
        and builder["virtual_pp_degree"] > 1
        and any(builder[name] for name in names)
    ):
        builder.messages.append(
            "dropout: an interleaved pipeline pads the rows of a step to one length, so its masks are others than "
            "those of the same run without pipelines, and just as random"
        )


PIPELINE_RULES = (pipeline_flags, enough_micro_batches, dropout_in_padded_rows)


# Rules of sharding: the words of `sharding_parallel_config` that act or change nothing, and what stages go with.

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
    "new values are exchanged at once, for evaluation and saving read weights outside their layers"
)
# Words that never change anything here, with the reason.
IGNORED_SHARDING_FLAGS = {
    "enable_stage1_overlap": "gradients are added up once, after the last micro-batch; fleet's overlap wants one of "
    "every parameter from every micro-batch, and an expert without tokens gives none",
    "enable_stage1_allgather_overlap": _SYNCHRONOUS_ALL_GATHER,
    "enable_stage1_broadcast_overlap": _SYNCHRONOUS_ALL_GATHER,
    "enable_stage2_overlap": "each gradient is freed where it is not needed as soon as it is sent, so sending is "
    "waited for",
    "enable_fuse_optimizer_states": "it puts moments side by side for fleet's own way of saving, and checkpoints are "
    "written tensor by tensor",
    "disable_stage1_reduce_avg": "gradients are always added up, never averaged on the way",
}
LEVEL1_FLAGS = {  # why the others have no use for them
    "split_param": {
        "stage2": "stage2 divides whole parameters among the ranks",
        "stage3": "stage3 always splits single parameters",
    },
    "enable_stage1_tensor_fusion": {
        "stage2": "stage2 sends each gradient as soon as it is there",
        "stage3": "stage3 gathers the parameters of a layer when it computes",
    },
}


@rule("sharding_parallel_config", "sharding_parallel_degree", "sharding", "release_grads")
def sharding_flags(builder: ConfigBuilder) -> None:
    """Words of `sharding_parallel_config` that change nothing are told. `enable_release_grads` stands for
    `release_grads`."""
    flags, sharding_level = builder["sharding_parallel_config"], builder["sharding"]
    if builder["sharding_parallel_degree"] == 1:
        return
    if "enable_release_grads" in flags:
        builder.derive("release_grads", True, "(enable_release_grads)")
    reasons = IGNORED_SHARDING_FLAGS | {
        flag: why[sharding_level] for flag, why in LEVEL1_FLAGS.items() if sharding_level in why
    }
    if sharding_level == "stage1" and "split_param" in flags:
        reasons["enable_stage1_tensor_fusion"] = "split_param fuses parameters anyway"
    elif sharding_level == "stage1" and builder["release_grads"]:
        reasons["enable_stage1_tensor_fusion"] = "fused gradients cannot be released"
    for flag in flags:
        if flag in reasons:
            where = builder.origins["sharding_parallel_config"]
            builder.messages.append(f"`sharding_parallel_config` ({where}): {flag} has no effect: {reasons[flag]}")


@rule("sharding", "sharding_parallel_degree", "tensor_parallel_degree", "pipeline_parallel_degree")
def sharding_levels_and_parallelism(builder: ConfigBuilder) -> None:
    """`stage2` and `stage3` divide whole models only, beside data parallelism; `stage1` goes with everything."""
    others = [name for name in ("tensor_parallel_degree", "pipeline_parallel_degree") if builder[name] > 1]
    if builder["sharding_parallel_degree"] > 1 and builder["sharding"] in ("stage2", "stage3") and others:
        what = (
            f"fleet divides gradients and parameters among ranks that each have a whole model, and "
            f"{' and '.join(f'{name} is {builder[name]}' for name in others)}"
        )
        builder.problem("sharding", what, "write sharding: stage1, which goes with every layout")


SHARDING_RULES = (sharding_flags, sharding_levels_and_parallelism)


# The words of `tensor_parallel_config`, and which of them change nothing.

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
    "it belongs to fleet's own linear layers; here one layer serves with and without tensor parallelism"
)
# Words that never change anything here, with the reason.
IGNORED_TENSOR_PARALLEL_FLAGS = {
    "enable_mp_async_allreduce": _FLEET_LINEARS_ONLY,
    "enable_mp_fused_linear_param_grad_add": _FLEET_LINEARS_ONLY,
    "enable_sp_async_reduce_scatter": _FLEET_LINEARS_ONLY,
    "enable_delay_scale_loss": "a loss is divided by what the whole step holds, and never by a number of micro-batches",
    "replace_with_c_embedding": "the embedding is always looked up in slices",
    "replace_with_parallel_cross_entropy": "tensor_parallel_output says whether the loss is computed from slices",
}


@rule("tensor_parallel_config", "tensor_parallel_degree", "sequence_parallel")
def tensor_parallel_flags(builder: ConfigBuilder) -> None:
    """Words of `tensor_parallel_config` that change nothing are told."""
    if builder["tensor_parallel_degree"] == 1:
        return
    reasons = dict(IGNORED_TENSOR_PARALLEL_FLAGS)
    if builder["sequence_parallel"]:
        reasons["enable_mp_skip_c_identity"] = "with sequence_parallel tokens are gathered, which copies them"
    for flag in builder["tensor_parallel_config"]:
        if flag in reasons:
            where = builder.origins["tensor_parallel_config"]
            builder.messages.append(f"`tensor_parallel_config` ({where}): {flag} has no effect: {reasons[flag]}")

"""Rules of sharding: the words of `sharding_parallel_config` that act or change nothing, and what stages go with."""

from __future__ import annotations

from erniekit.parameters.declaration import rule
from erniekit.parameters.draft import ConfigBuilder

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

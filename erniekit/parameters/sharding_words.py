"""Rules of sharding: the words of `sharding_parallel_config` that act or change nothing, and what stages go with."""

from __future__ import annotations

from erniekit.parameters.declaration import rule
from erniekit.parameters.draft import Draft

SHARDING_WORDS = (
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
_EXCHANGED_AT_ONCE = "new values are exchanged at once, for evaluation and saving read weights outside their layers"
# Words that never change anything here, with the reason.
WITHOUT_EFFECT = {
    "enable_stage1_overlap": "gradients are added up once, after the last micro-batch; fleet's overlap wants one of "
    "every parameter from every micro-batch, and an expert without tokens gives none",
    "enable_stage1_allgather_overlap": _EXCHANGED_AT_ONCE,
    "enable_stage1_broadcast_overlap": _EXCHANGED_AT_ONCE,
    "enable_stage2_overlap": "each gradient is freed where it is not needed as soon as it is sent, so sending is "
    "waited for",
    "enable_fuse_optimizer_states": "it puts moments side by side for fleet's own way of saving, and checkpoints are "
    "written tensor by tensor",
    "disable_stage1_reduce_avg": "gradients are always added up, never averaged on the way",
}
OF_STAGE1 = {  # why the others have no use for them
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
def words_of_sharding(draft: Draft) -> None:
    """Words of `sharding_parallel_config` that change nothing are told. `enable_release_grads` stands for
    `release_grads`."""
    words, stage = draft["sharding_parallel_config"], draft["sharding"]
    if draft["sharding_parallel_degree"] == 1:
        return
    if "enable_release_grads" in words:
        draft.derive("release_grads", True, "(enable_release_grads)")
    reasons = WITHOUT_EFFECT | {word: why[stage] for word, why in OF_STAGE1.items() if stage in why}
    if stage == "stage1" and "split_param" in words:
        reasons["enable_stage1_tensor_fusion"] = "split_param fuses parameters anyway"
    elif stage == "stage1" and draft["release_grads"]:
        reasons["enable_stage1_tensor_fusion"] = "fused gradients cannot be released"
    for word in words:
        if word in reasons:
            where = draft.origins["sharding_parallel_config"]
            draft.messages.append(f"`sharding_parallel_config` ({where}): {word} has no effect: {reasons[word]}")


@rule("sharding", "sharding_parallel_degree", "tensor_parallel_degree", "pipeline_parallel_degree")
def stages_beside_other_parallelism(draft: Draft) -> None:
    """`stage2` and `stage3` divide whole models only, beside data parallelism; `stage1` goes with everything."""
    others = [name for name in ("tensor_parallel_degree", "pipeline_parallel_degree") if draft[name] > 1]
    if draft["sharding_parallel_degree"] > 1 and draft["sharding"] in ("stage2", "stage3") and others:
        what = (
            f"fleet divides gradients and parameters among ranks that each have a whole model, and "
            f"{' and '.join(f'{name} is {draft[name]}' for name in others)}"
        )
        draft.problem("sharding", what, "write sharding: stage1, which goes with every layout")


RULES = (words_of_sharding, stages_beside_other_parallelism)

"""The words of `tensor_parallel_config`, and which of them change nothing."""

from __future__ import annotations

from erniekit.parameters.declaration import rule
from erniekit.parameters.draft import Draft

TENSOR_WORDS = (
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
_OWN_LINEARS = "it belongs to fleet's own linear layers; here one layer serves with and without tensor parallelism"
# Words that never change anything here, with the reason.
WITHOUT_EFFECT = {
    "enable_mp_async_allreduce": _OWN_LINEARS,
    "enable_mp_fused_linear_param_grad_add": _OWN_LINEARS,
    "enable_sp_async_reduce_scatter": _OWN_LINEARS,
    "enable_delay_scale_loss": "a loss is divided by what the whole step holds, and never by a number of micro-batches",
    "replace_with_c_embedding": "the embedding is always looked up in slices",
    "replace_with_parallel_cross_entropy": "tensor_parallel_output says whether the loss is computed from slices",
}


@rule("tensor_parallel_config", "tensor_parallel_degree", "sequence_parallel")
def words_of_tensor_parallelism(draft: Draft) -> None:
    """Words of `tensor_parallel_config` that change nothing are told."""
    if draft["tensor_parallel_degree"] == 1:
        return
    reasons = dict(WITHOUT_EFFECT)
    if draft["sequence_parallel"]:
        reasons["enable_mp_skip_c_identity"] = "with sequence_parallel tokens are gathered, which copies them"
    for word in draft["tensor_parallel_config"]:
        if word in reasons:
            where = draft.origins["tensor_parallel_config"]
            draft.messages.append(f"`tensor_parallel_config` ({where}): {word} has no effect: {reasons[word]}")

"""The words of `tensor_parallel_config`, and which of them change nothing."""

from __future__ import annotations

from erniekit.parameters.declaration import rule
from erniekit.parameters.draft import ConfigBuilder

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

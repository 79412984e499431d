"""Rules of tensor parallelism: the words of `tensor_parallel_config` that change nothing, and more."""

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


@rule("eval_answers", "sequence_parallel", "tensor_parallel_degree", "do_train")
def answers_have_no_sequence_to_divide(draft: Draft) -> None:
    """Answers are written one token at a time, which `sequence_parallel` cannot divide."""
    divided = draft["sequence_parallel"] and draft["tensor_parallel_degree"] > 1
    if divided and draft["do_train"] and draft["eval_answers"]:
        what = "answers are written one token at a time, and sequence_parallel divides tokens between ranks"
        remedy = "write sequence_parallel: false; or eval_answers: 0, and `erniekit eval OUTPUT_DIR` after the training"
        draft.problem("eval_answers", what, remedy)


RULES = (words_of_tensor_parallelism, answers_have_no_sequence_to_divide)

"""Rules of pipelines: the words of `pipeline_parallel_config` that act, change nothing or cannot be had, and more."""

from __future__ import annotations

from erniekit.parameters.declaration import rule
from erniekit.parameters.draft import Draft

PIPELINE_WORDS = (
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
_ONCE = "gradients are added up once, after the last micro-batch, and fleet's overlap would average them"
# Words that never change anything here, with the reason.
WITHOUT_EFFECT = {
    "enable_delay_scale_loss": "a loss is divided by what the whole step holds, and never by a number of micro-batches",
    "enable_dp_comm_overlap": _ONCE,
    "enable_sharding_comm_overlap": _ONCE,
}
ONLY_INTERLEAVED = ("enable_overlap_p2p_comm", "best_unbalanced_scheduler")


@rule("pipeline_parallel_config", "pipeline_parallel_degree", "virtual_pp_degree", "tensor_parallel_degree")
def words_of_pipelines(draft: Draft) -> None:
    """Words of `pipeline_parallel_config` that contradict each other or the layout are refused; those that change
    nothing are told. `enable_release_grads` stands for `release_grads`."""
    words = set(draft["pipeline_parallel_config"])
    if draft["pipeline_parallel_degree"] == 1 or not words:
        return
    for what, write in _contradictions(words, interleaved=draft["virtual_pp_degree"] > 1):
        draft.problem("pipeline_parallel_config", what, write)
    for word, why in _without_effect(draft, words):
        draft.messages.append(
            f"`pipeline_parallel_config` ({draft.origins['pipeline_parallel_config']}): {word} has no effect: {why}"
        )
    if "enable_release_grads" in words:
        draft.derive("release_grads", True, "(enable_release_grads)")


def _contradictions(words: set[str], *, interleaved: bool) -> list[tuple[str, str]]:
    """What is wrong, and what to write instead."""
    found = []
    if "enable_split_backward" in words:
        what = "enable_split_backward: Paddle's fleet has no schedule whose backward passes are split (zero bubble)"
        found.append((what, "leave it out; virtual_pp_degree shortens the time in which stages wait"))
    if interleaved and "disable_p2p_cache_shape" in words:
        what = "disable_p2p_cache_shape: an interleaved pipeline (virtual_pp_degree above 1) must know the shapes"
        found.append((what, "leave it out, or write virtual_pp_degree: 1"))
    if {"disable_batch_p2p_comm", "disable_non_batch_p2p_comm"} <= words:
        what = "disable_batch_p2p_comm and disable_non_batch_p2p_comm leave stages no way to exchange tensors"
        found.append((what, "leave one of them out"))
    if {"enable_overlap_p2p_comm", "disable_non_batch_p2p_comm"} <= words:
        what = (
            "enable_overlap_p2p_comm works with exchanges that are not batched, and disable_non_batch_p2p_comm is set"
        )
        found.append((what, "leave one of them out"))
    return found


def _without_effect(draft: Draft, words: set[str]) -> list[tuple[str, str]]:
    found = [(word, why) for word, why in WITHOUT_EFFECT.items() if word in words]
    if draft["virtual_pp_degree"] == 1:
        why = "it belongs to interleaved pipelines, and virtual_pp_degree is 1"
        found += [(word, why) for word in ONLY_INTERLEAVED if word in words]
    if "disable_partial_send_recv" in words and draft["tensor_parallel_degree"] == 1:
        found.append(("disable_partial_send_recv", "tensor_parallel_degree is 1, so tensors are sent whole"))
    elif "disable_partial_send_recv" in words and draft["sequence_parallel"]:
        found.append(("disable_partial_send_recv", "with sequence_parallel tensors are never sent in parts"))
    return found


@rule("virtual_pp_degree", "pipeline_parallel_degree", "gradient_accumulation_steps")
def enough_micro_batches(draft: Draft) -> None:
    """An interleaved pipeline wants as many micro-batches as stages, or at least twice as many."""
    stages, count = draft["pipeline_parallel_degree"], draft["gradient_accumulation_steps"]
    if draft["virtual_pp_degree"] == 1 or count == stages or count >= 2 * stages:
        return
    fitting = stages if count < stages else 2 * stages
    draft.messages.append(
        f"`gradient_accumulation_steps` is {count}: an interleaved pipeline of {stages} stages runs {fitting} "
        f"micro-batches, so in every step {fitting - count} are computed that count for nothing; better write {fitting}"
    )


@rule("virtual_pp_degree", "pipeline_parallel_degree", "hidden_dropout_prob", "attention_probs_dropout_prob")
def dropout_in_padded_rows(draft: Draft) -> None:
    """An interleaved pipeline pads the rows of a step to one length, which changes the draws of dropout."""
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    if draft["pipeline_parallel_degree"] > 1 and draft["virtual_pp_degree"] > 1 and any(draft[name] for name in names):
        draft.messages.append(
            "dropout: an interleaved pipeline pads the rows of a step to one length, so its masks are others than "
            "those of the same run without pipelines, and just as random"
        )


RULES = (words_of_pipelines, enough_micro_batches, dropout_in_padded_rows)

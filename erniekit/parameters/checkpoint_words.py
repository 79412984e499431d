"""Rules of the words of `unified_checkpoint_config`: what they stand for, contradict, and where they change nothing."""

from __future__ import annotations

from typing import Any, Protocol

from erniekit.parameters.declaration import rule
from erniekit.parameters.draft import Draft

NAME = "unified_checkpoint_config"
UNIFIED_WORDS = (
    "async_save",
    "ignore_merge_optimizer",
    "master_weight_compatible",
    "remove_master_weight",
    "skip_save_model_weight",
    "enable_all_options",
)
# What `enable_all_options` stands for: what saves time and room and loses nothing.
ALL_OPTIONS = ("async_save", "skip_save_model_weight", "master_weight_compatible")
OF_MASTERS = ("remove_master_weight", "skip_save_model_weight")


class Values(Protocol):
    """Those of all parameters, by name."""

    def __getitem__(self, name: str) -> Any: ...


@rule(NAME)
def all_options(draft: Draft) -> None:
    """`enable_all_options` stands for `async_save`, `skip_save_model_weight` and `master_weight_compatible`."""
    words = draft[NAME]
    if "enable_all_options" in words:
        others = [word for word in words if word != "enable_all_options"]
        draft.change(NAME, tuple(dict.fromkeys((*ALL_OPTIONS, *others))), "enable_all_options stands for them")


@rule(NAME, "unified_checkpoint", "lora", "bf16", "fp16", "fp16_opt_level", "ignore_save_lr_and_optim")
def words_of_checkpoints(draft: Draft) -> None:
    """Words of `unified_checkpoint_config` that contradict each other are refused; those that change nothing are
    told."""
    words = set(draft[NAME])
    if words.issuperset(OF_MASTERS):
        what = "remove_master_weight and skip_save_model_weight together would leave the weights out altogether"
        draft.problem(NAME, what, "leave one of them out")
        return
    for word in (*OF_MASTERS, "ignore_merge_optimizer"):
        if word in words and (why := why_without_effect(draft, word)):
            draft.messages.append(f"`{NAME}` ({draft.origins[NAME]}): {word} has no effect: {why}")


def why_without_effect(values: Values, word: str) -> str:
    """Why a word of those that some runs have no use for changes nothing; empty where it acts."""
    if not values["unified_checkpoint"]:
        return "with unified_checkpoint: false every rank writes all that it has"
    if word not in OF_MASTERS:
        return ""
    if not (values["bf16"] or values["fp16"]) or values["fp16_opt_level"] != "O2":
        return "the weights are float32, without master weights; those come with bf16 or fp16 and fp16_opt_level: O2"
    if word == "skip_save_model_weight" and values["lora"]:
        return "adapters are small, and are saved beside their master weights"
    if word == "remove_master_weight" and values["ignore_save_lr_and_optim"]:
        return "with ignore_save_lr_and_optim nothing of the optimizer is saved"
    return ""


RULES = (all_options, words_of_checkpoints)

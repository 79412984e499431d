"""Rules of the words of `unified_checkpoint_config`: what they stand for, contradict, and where they change nothing."""

from __future__ import annotations

from typing import Any, Protocol

from erniekit.parameters.declaration import rule
from erniekit.parameters.draft import ConfigBuilder

NAME = "unified_checkpoint_config"
UNIFIED_CHECKPOINT_FLAGS = (
    "async_save",
    "ignore_merge_optimizer",
    "master_weight_compatible",
    "remove_master_weight",
    "skip_save_model_weight",
    "enable_all_options",
)
# What `enable_all_options` stands for: what saves time and room and loses nothing.
ALL_OPTIONS = ("async_save", "skip_save_model_weight", "master_weight_compatible")
MASTER_WEIGHT_FLAGS = ("remove_master_weight", "skip_save_model_weight")


class ParameterValues(Protocol):
    """Those of all parameters, by name."""

    def __getitem__(self, name: str) -> Any: ...


@rule(NAME)
def all_options(builder: ConfigBuilder) -> None:
    """`enable_all_options` stands for `async_save`, `skip_save_model_weight` and `master_weight_compatible`."""
    flags = builder[NAME]
    if "enable_all_options" in flags:
        others = [flag for flag in flags if flag != "enable_all_options"]
        builder.change(NAME, tuple(dict.fromkeys((*ALL_OPTIONS, *others))), "enable_all_options stands for them")


@rule(NAME, "unified_checkpoint", "lora", "bf16", "fp16", "fp16_opt_level", "ignore_save_lr_and_optim")
def unified_checkpoint_flags(builder: ConfigBuilder) -> None:
    """Words of `unified_checkpoint_config` that contradict each other are refused; those that change nothing are
    told."""
    flags = set(builder[NAME])
    if flags.issuperset(MASTER_WEIGHT_FLAGS):
        what = "remove_master_weight and skip_save_model_weight together would leave the weights out altogether"
        builder.problem(NAME, what, "leave one of them out")
        return
    for flag in (*MASTER_WEIGHT_FLAGS, "ignore_merge_optimizer"):
        if flag in flags and (why := reason_ignored(builder, flag)):
            builder.messages.append(f"`{NAME}` ({builder.origins[NAME]}): {flag} has no effect: {why}")


def reason_ignored(values: ParameterValues, flag: str) -> str:
    """Why a word of those that some runs have no use for changes nothing; empty where it acts."""
    if not values["unified_checkpoint"]:
        return "with unified_checkpoint: false every rank writes all that it has"
    if flag not in MASTER_WEIGHT_FLAGS:
        return ""
    if not (values["bf16"] or values["fp16"]) or values["fp16_opt_level"] != "O2":
        return "the weights are float32, without master weights; those come with bf16 or fp16 and fp16_opt_level: O2"
    if flag == "skip_save_model_weight" and values["lora"]:
        return "adapters are small, and are saved beside their master weights"
    if flag == "remove_master_weight" and values["ignore_save_lr_and_optim"]:
        return "with ignore_save_lr_and_optim nothing of the optimizer is saved"
    return ""


RULES = (all_options, unified_checkpoint_flags)

"""1.6 Checkpoints: what is saved, when and how, and where a run resumes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from erniekit.config.parameter import ConfigBuilder, parameter, rule, section, when
from erniekit.config.values import PATH_OR_BOOLEAN, PATH_OR_URL, WORDS

# The flags of `unified_checkpoint_config`: which ones exclude each other, and when one has no effect.

NAME = "unified_checkpoint_config"
UNIFIED_CHECKPOINT_FLAGS = (
    "async_save",
    "ignore_merge_optimizer",
    "master_weight_compatible",
    "remove_master_weight",
    "skip_save_model_weight",
    "enable_all_options",
)
# The flags that `enable_all_options` expands to: they save time and disk space and lose nothing.
ALL_OPTIONS = ("async_save", "skip_save_model_weight", "master_weight_compatible")
MASTER_WEIGHT_FLAGS = ("remove_master_weight", "skip_save_model_weight")


class ParameterValues(Protocol):
    """Those of all parameters, by name."""

    def __getitem__(self, name: str) -> Any: ...


@rule(NAME)
def all_options(builder: ConfigBuilder) -> None:
    """`enable_all_options` expands to `async_save`, `skip_save_model_weight` and `master_weight_compatible`."""
    flags = builder[NAME]
    if "enable_all_options" in flags:
        others = [flag for flag in flags if flag != "enable_all_options"]
        builder.change(NAME, tuple(dict.fromkeys((*ALL_OPTIONS, *others))), "enable_all_options expands to them")


@rule(NAME, "unified_checkpoint", "lora", "bf16", "fp16", "fp16_opt_level", "ignore_save_lr_and_optim")
def unified_checkpoint_flags(builder: ConfigBuilder) -> None:
    """Flags of `unified_checkpoint_config` that contradict each other are refused; those without effect are named."""
    flags = set(builder[NAME])
    if flags.issuperset(MASTER_WEIGHT_FLAGS):
        what = "remove_master_weight and skip_save_model_weight together would save no weights at all"
        builder.problem(NAME, what, "leave one of them out")
        return
    for flag in (*MASTER_WEIGHT_FLAGS, "ignore_merge_optimizer"):
        if flag in flags and (why := reason_ignored(builder, flag)):
            builder.messages.append(f"`{NAME}` ({builder.origins[NAME]}): {flag} has no effect: {why}")


def reason_ignored(values: ParameterValues, flag: str) -> str:
    """Return why a flag has no effect in this run; empty where it has one."""
    if not values["unified_checkpoint"]:
        return "with unified_checkpoint: false every rank writes all that it has"
    if flag not in MASTER_WEIGHT_FLAGS:
        return ""
    if not (values["bf16"] or values["fp16"]) or values["fp16_opt_level"] != "O2":
        return "the weights are float32, without master weights; those come with bf16 or fp16 and fp16_opt_level: O2"
    if flag == "skip_save_model_weight" and values["lora"]:
        return "adapters are small, and are saved together with their master weights"
    if flag == "remove_master_weight" and values["ignore_save_lr_and_optim"]:
        return "with ignore_save_lr_and_optim no optimizer state is saved"
    return ""


RULES = (all_options, unified_checkpoint_flags)


@dataclass(frozen=True)
class CheckpointParameters:
    """The checkpoints of a run: their schedule and contents, and the checkpoint from which a run resumes."""

    save_strategy: str = parameter(
        "no",
        "When checkpoints are written: every `save_steps` (`steps`), at the end of each epoch (`epoch`), or not at all "
        "(`no`). The final model is always saved; restarting after a failure needs `steps` or `epoch`. With `no` a "
        "message at the start says that a run which is interrupted begins anew.",
        choices=("no", "steps", "epoch"),
        example="steps",
    )
    save_steps: int = parameter(
        100,
        "The number of optimizer steps between two checkpoints.",
        minimum=1,
        unit="optimizer steps",
        needs=when("save_strategy", "steps"),
        example=500,
    )
    save_total_limit: int | None = parameter(
        None,
        "Keep this many of the newest checkpoints, and delete older ones once a newer one is complete. With "
        "`load_best_model_at_end` the best one is never deleted and counts as one of them; with a limit of 1 the "
        "newest and the best may both stay, as in transformers. null keeps all.",
        minimum=1,
        unit="checkpoints",
        needs=when("save_strategy", "steps", "epoch"),
        example=3,
    )
    resume_from_checkpoint: str | bool = parameter(
        False,
        "Continue an interrupted run: weights, optimizer, schedule and the position in the data continue exactly "
        "where the checkpoint was written. A path or a URL names one checkpoint folder, true takes the newest "
        "complete one in `output_dir`.",
        kind=PATH_OR_BOOLEAN,
        example=True,
    )
    init_from_checkpoint: str = parameter(
        "",
        "Start a new run from the weights of a checkpoint folder; optimizer, schedule and data start from the "
        "beginning.",
        kind=PATH_OR_URL,
        example="output/sft/checkpoint-100",
    )
    unified_checkpoint: bool = parameter(
        True,
        "Write weights and optimizer states in one layout that any number and arrangement of devices can read. When "
        "false every rank writes its own shard without communication. Saving is then fastest, but such a checkpoint "
        "can only be resumed from, on the layout that wrote it, and all ranks must see the same `output_dir`. The "
        "final model is always written in full.",
    )
    unified_checkpoint_config: tuple[str, ...] = parameter(
        (),
        "Options of saving. `async_save`: training waits only until the values are in shared memory, and another "
        "process writes them; a second save waits for the first. `ignore_merge_optimizer`: every rank writes the "
        "optimizer states that it has. The others concern runs with 16-bit weights (`fp16_opt_level: O2`), whose "
        "optimizer keeps float32 copies, the master weights. `remove_master_weight` does not save the master weights; "
        "a resumed run makes them from the weights, which is not bit-exact. `skip_save_model_weight` saves the master "
        "weights instead of the weights, which can be rounded from them without loss. `master_weight_compatible` "
        "resumes from checkpoints with or without master weights, whether or not the run needs them. "
        "`enable_all_options` expands to `async_save`, `skip_save_model_weight` and `master_weight_compatible`.",
        kind=WORDS,
        choices=UNIFIED_CHECKPOINT_FLAGS,
        example="async_save",
    )
    ckpt_quant_stage: str = parameter(
        "O0",
        "How AdamW's moments are compressed in checkpoints: not (`O0`), to 8 bits each (`O1`, a quarter of their "
        "size), or to 4 bits (`O2`, a seventh). A run that resumes from compressed moments is not an exact "
        "continuation; `docs/checkpoints.md` says how far off it is. Each checkpoint records how it is stored, so "
        "resuming needs no setting, and the resumed run may choose another value.",
        choices=("O0", "O1", "O2"),
        needs=when("ignore_save_lr_and_optim", False),
        example="O1",
    )
    disable_ckpt_quant: bool = parameter(
        False,
        "Write optimizer states uncompressed, whatever `ckpt_quant_stage` says.",
        needs=when("ckpt_quant_stage", "O1", "O2"),
    )
    ignore_save_lr_and_optim: bool = parameter(
        False,
        "Do not save optimizer states, so that checkpoints take about a third of the size. To resume from such a "
        "checkpoint set `ignore_load_lr_and_optim`; the run is then not an exact continuation.",
    )
    ignore_load_lr_and_optim: bool = parameter(
        False,
        "Resume the weights and the position only; the optimizer's moments start from zero. The learning rate "
        "continues its schedule at the restored step.",
        needs=when("resume_from_checkpoint"),
    )
    max_shard_size: float = parameter(
        5.0,
        "The largest size of one safetensors file; larger models are written as several files with an index.",
        above=0.0,
        unit="GB (10^9 bytes)",
        verbs=("train", "export", "split"),
        example=2.0,
    )
    hf_hub_id: str = parameter(
        "",
        "The repository on the Hugging Face Hub that an exported model is uploaded to, as `erniekit export --push` "
        "does. Empty uploads nothing.",
        verbs=("export",),
        example="me/my-model",
    )


@rule("resume_from_checkpoint", "init_from_checkpoint")
def resume_or_initialise(builder: ConfigBuilder) -> None:
    """`resume_from_checkpoint` and `init_from_checkpoint` exclude each other."""
    if builder["resume_from_checkpoint"] and builder["init_from_checkpoint"]:
        what = "a run either resumes or starts from the weights of a checkpoint"
        builder.problem("init_from_checkpoint", what, "remove it or `resume_from_checkpoint`")


@rule("init_from_checkpoint", "continue_training")
def checkpoint_weights_or_random(builder: ConfigBuilder) -> None:
    """`init_from_checkpoint` needs `continue_training: true`, since false asks for random weights."""
    if builder["init_from_checkpoint"] and not builder["continue_training"]:
        what = "`continue_training: false` asks for random weights"
        builder.problem("init_from_checkpoint", what, "remove one of the two")


_OF_CHECKPOINTS = (
    "unified_checkpoint", "ckpt_quant_stage", "disable_ckpt_quant", "ignore_save_lr_and_optim",
)  # fmt: skip


@rule("save_strategy", "resume_from_checkpoint", NAME, *_OF_CHECKPOINTS, verbs=("train",))
def options_of_checkpoints_need_checkpoints(builder: ConfigBuilder) -> None:
    """What checkpoints hold and how they are written has no effect with `save_strategy: no`."""
    if builder["save_strategy"] != "no":
        return
    names = [name for name in _OF_CHECKPOINTS if builder.differs(name)]
    written = set(builder[NAME]) - {"master_weight_compatible"} or not builder["resume_from_checkpoint"]
    if builder.differs(NAME) and written:  # that flag is about reading
        names.append(NAME)
    for name in names:
        builder.no_effect(name, "because save_strategy is no, so only the command `save` writes a checkpoint")


def leaves_no_checkpoint(section: CheckpointParameters) -> list[str]:
    """Return the line with which a run begins that writes no checkpoint; none for other runs."""
    if section.save_strategy != "no":
        return []
    return [
        "save_strategy is no: this run writes no checkpoint, so it cannot be resumed if it is interrupted; the final "
        "model is saved. Write save_strategy: steps (every save_steps) or epoch to keep some."
    ]


def moment_quantization(section: CheckpointParameters) -> str:
    """Return how checkpoints store AdamW's moments: `O0` uncompressed, `O1` in 8 bits, `O2` in 4 bits."""
    return "O0" if section.disable_ckpt_quant else section.ckpt_quant_stage


def saves_asynchronously(section: CheckpointParameters) -> bool:
    """Return whether another process writes checkpoints to disk while training continues."""
    return "async_save" in section.unified_checkpoint_config


SECTION = section(
    CheckpointParameters,
    key="checkpoint",
    title="1.6 Checkpoints",
    verbs=("train",),
    rules=(resume_or_initialise, checkpoint_weights_or_random, options_of_checkpoints_need_checkpoints, *RULES),
)

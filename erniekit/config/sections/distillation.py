"""2.11 Distillation: training towards a teacher's distributions."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.parameter import ConfigBuilder, parameter, rule, section, when
from erniekit.config.values import PATH, PATH_OR_URL


@dataclass(frozen=True)
class DistillationParameters:
    """The teacher of stage DISTILL, and the divergence of the trained model, the student, from it."""

    teacher_model_name_or_path: str = parameter(
        "",
        "The teacher: a folder, or a name on the hub as for `model_name_or_path`. It must have the student's "
        "vocabulary: the same token behind every id; rows of logits behind the last token may differ. It is not "
        "trained, and takes the memory of its weights in every process beside the student; ranks of "
        "`tensor_parallel_degree` divide it.",
        kind=PATH_OR_URL,
        example="output/teacher",
    )
    distill_divergence: str = parameter(
        "forward_kl",
        "The divergence of the student's distribution p from the teacher's q at every target token. `forward_kl`, "
        "KL(q || p), makes the student cover all that the teacher may say; `reverse_kl`, KL(p || q), makes it keep "
        "to what the teacher finds likely; `jsd`, the generalised Jensen-Shannon divergence, lies between them.",
        choices=("forward_kl", "reverse_kl", "jsd"),
    )
    jsd_beta: float = parameter(
        0.5,
        "The share b of the teacher in the mixture m = b q + (1 - b) p of `jsd`, whose value is b KL(q || m) + "
        "(1 - b) KL(p || m). Divided by b it approaches `forward_kl` as b approaches 0, divided by 1 - b "
        "`reverse_kl` as b approaches 1.",
        above=0.0,
        below=1.0,
        needs=when("distill_divergence", "jsd"),
        example=0.1,
    )
    distill_temperature: float = parameter(
        1.0,
        "What the logits of student and teacher are divided by before they are compared; the divergence is multiplied "
        "by its square, so that gradients keep their size. Above 1 the unlikely tokens count for more.",
        above=0.0,
        example=2.0,
    )
    distill_sft_share: float = parameter(
        0.0,
        "The share s of the loss of stage SFT in the total, (1 - s) x divergence + s x SFT loss, both for each target "
        "token. The SFT loss has no temperature.",
        minimum=0.0,
        maximum=1.0,
        example=0.5,
    )
    teacher_top_k: int = parameter(
        0,
        "Read the teacher's so many likeliest tokens of every target position from disk, where they are written once "
        "before the first step; the teacher then takes no memory while the student is trained, and a second run does "
        "not ask it again. Its probability is divided among them; all other tokens get none. A target takes 8 bytes "
        "for each. 0: the teacher stays in memory and gives all tokens. An evaluation without training asks the "
        "teacher itself.",
        minimum=0,
        unit="tokens",
        verbs=("train",),
        example=64,
    )
    teacher_top_k_dir: str = parameter(
        "",
        "The folder of what `teacher_top_k` writes; all ranks must see it. A folder that was made from another "
        "teacher, from other data or with another k is refused. Empty: a folder of `data_cache_dir` whose name says "
        "what it is made from.",
        kind=PATH,
        needs=when("teacher_top_k", above=0),
        verbs=("train",),
        example="output/teacher-top-64",
    )
    on_policy_ratio: float = parameter(
        0.0,
        "The share of steps that train on answers which the student has just written to the prompts of their samples, "
        "instead of the answers in the data (GKD, with the letter lambda). The teacher says of every token of them "
        "what it would have said. 1: all steps.",
        minimum=0.0,
        maximum=1.0,
        verbs=("train",),
        example=0.5,
    )
    on_policy_max_new_tokens: int = parameter(
        256,
        "The most tokens of an answer that the student writes; prompt and answer have at most `max_seq_len`.",
        minimum=1,
        unit="tokens",
        needs=when("on_policy_ratio", above=0),
        verbs=("train",),
        example=64,
    )
    on_policy_temperature: float = parameter(
        1.0,
        "The temperature at which the student writes its answers; 0 always takes the likeliest token.",
        minimum=0.0,
        needs=when("on_policy_ratio", above=0),
        verbs=("train",),
        example=0.7,
    )


@rule("teacher_model_name_or_path", stages=("DISTILL",))
def distillation_has_a_teacher(builder: ConfigBuilder) -> None:
    """`teacher_model_name_or_path` is given."""
    if not builder["teacher_model_name_or_path"]:
        builder.missing("teacher_model_name_or_path")


@rule("teacher_top_k", "distill_divergence", "on_policy_ratio", "distributed_dataloader", stages=("DISTILL",))
def a_table_has_what_the_loss_asks_for(builder: ConfigBuilder) -> None:
    """`teacher_top_k` goes neither with `reverse_kl`, `on_policy_ratio` nor `distributed_dataloader`."""
    if not builder["teacher_top_k"]:
        return
    if builder["distill_divergence"] == "reverse_kl":
        builder.problem(
            "teacher_top_k",
            "`reverse_kl` is infinite where the student gives probability to a token that is not among the teacher's",
            "write distill_divergence: jsd with jsd_beta close to 1, or 0 here",
        )
    if builder["on_policy_ratio"]:
        builder.problem(
            "teacher_top_k",
            "what the student will write is not known before the first step, so nothing of it is on disk",
            "write 0, or on_policy_ratio: 0",
        )
    if builder["distributed_dataloader"]:
        builder.problem(
            "teacher_top_k",
            "every rank reads the samples that it asks the teacher about",
            "write distributed_dataloader: false",
        )


@rule("on_policy_ratio", "distill_sft_share", "sharding", "moe_group", "distributed_dataloader", stages=("DISTILL",))
def own_answers_can_be_written(builder: ConfigBuilder) -> None:
    """`on_policy_ratio` goes neither with `distill_sft_share` nor with layouts whose ranks answer in step."""
    if not builder["on_policy_ratio"]:
        return
    if builder["distill_sft_share"]:
        builder.problem(
            "distill_sft_share",
            "the SFT loss of the student's own answers teaches it what it does anyway",
            "write 0, or on_policy_ratio: 0",
        )
    if builder["sharding"] == "stage3":
        builder.problem(
            "on_policy_ratio",
            "ranks of sharding: stage3 have a layer's weights only together, and their answers differ in length",
            "write sharding: stage2, or 0 here",
        )
    if builder["moe_group"] == "data":
        builder.problem(
            "on_policy_ratio",
            "ranks that share experts compute together, and their answers differ in length",
            "write moe_group: mp, or 0 here",
        )
    if builder["distributed_dataloader"]:
        builder.problem(
            "on_policy_ratio", "every rank reads the samples that it answers", "write distributed_dataloader: false"
        )


@rule("pipeline_parallel_degree", stages=("DISTILL",))
def a_teacher_has_no_pipeline(builder: ConfigBuilder) -> None:
    """`pipeline_parallel_degree` is 1: a teacher with other layers cannot be cut as the student is."""
    if builder["pipeline_parallel_degree"] > 1:
        builder.problem(
            "pipeline_parallel_degree",
            "stage DISTILL has no pipelines: only the last stage computes the loss, and a teacher with other layers "
            "than the student's cannot be cut as the student is",
            "use data and tensor parallelism, or sharding",
        )


@rule(
    "use_fused_head_and_loss_fn", "use_sparse_head_and_loss_fn", "tensor_parallel_output", stages=("DISTILL",),
)  # fmt: skip
def distillation_is_always_in_chunks(builder: ConfigBuilder) -> None:
    """Head and loss are always computed in chunks of the target positions, from the shards of the vocabulary."""
    for name in ("use_fused_head_and_loss_fn", "use_sparse_head_and_loss_fn", "tensor_parallel_output"):
        if builder.differs(name):
            builder.no_effect(name, "because stage DISTILL always computes chunks of the positions that have a label")


SECTION = section(
    DistillationParameters,
    key="distillation",
    title="2.11 Distillation",
    verbs=("train", "eval"),
    stages=("DISTILL",),
    rules=(
        distillation_has_a_teacher,
        a_table_has_what_the_loss_asks_for,
        own_answers_can_be_written,
        a_teacher_has_no_pipeline,
        distillation_is_always_in_chunks,
    ),
)

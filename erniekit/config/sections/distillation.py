"""2.11 Distillation: training towards a teacher's distributions."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.parameter import ConfigBuilder, parameter, rule, section, when
from erniekit.config.values import PATH_OR_URL


@dataclass(frozen=True)
class DistillationParameters:
    """The teacher of stage DISTILL, and the divergence of the trained model, the student, from it."""

    teacher_model_name_or_path: str = parameter(
        "",
        "The teacher: a folder, or a name on the hub as for `model_name_or_path`. It must have the student's "
        "vocabulary: the same token behind every id, and as many rows of logits. It is not trained, and takes the "
        "memory of its weights in every process beside the student; ranks of `tensor_parallel_degree` divide it.",
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


@rule("teacher_model_name_or_path", stages=("DISTILL",))
def distillation_has_a_teacher(builder: ConfigBuilder) -> None:
    """`teacher_model_name_or_path` is given."""
    if not builder["teacher_model_name_or_path"]:
        builder.missing("teacher_model_name_or_path")


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
    rules=(distillation_has_a_teacher, a_teacher_has_no_pipeline, distillation_is_always_in_chunks),
)

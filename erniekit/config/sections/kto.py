"""2.9 KTO: training on single answers with a verdict."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.parameter import ConfigBuilder, parameter, rule, section


@dataclass(frozen=True)
class KtoParameters:
    """The weights of the loss over answers that are desirable or undesirable; 2.3 DPO has its `beta` and its reference
    model."""

    desirable_weight: float = parameter(
        1.0,
        "The weight of desirable answers in the loss. Where there are fewer of them than of undesirable ones, raise it "
        "so that `desirable_weight` x their number is 1 to 1.33 times `undesirable_weight` x the number of the others.",
        minimum=0.0,
        example=1.33,
    )
    undesirable_weight: float = parameter(
        1.0,
        "The weight of undesirable answers in the loss. Where there are fewer of them than of desirable ones, raise "
        "this one.",
        minimum=0.0,
        example=2.0,
    )


@rule("desirable_weight", "undesirable_weight", stages=("KTO",))
def some_answers_count(builder: ConfigBuilder) -> None:
    """`desirable_weight` and `undesirable_weight` may not both be 0."""
    if not (builder["desirable_weight"] or builder["undesirable_weight"]):
        builder.problem("desirable_weight", "the weights of all answers are 0", "give one of them a positive value")


SECTION = section(
    KtoParameters,
    key="kto",
    title="2.9 KTO",
    verbs=("train", "eval"),
    stages=("KTO",),
    rules=(some_answers_count,),
)

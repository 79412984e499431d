"""2.7 Units: how units of speech are written as tokens, and how speech and text are interleaved."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.parameter import ConfigBuilder, parameter, rule, section
from erniekit.config.stages import WORD_STAGES

DATA_VERBS = ("train", "eval", "preview")
TOKEN_VERBS = (*DATA_VERBS, "generate")
ALIGNED_STAGES = ("PT", "SFT")  # which read `aligned_units`
INTERLEAVING = (
    "units_per_second", "interleave_segment_seconds", "interleave_text_probability",
    "interleave_correspond_probability",
)  # fmt: skip


@dataclass(frozen=True)
class UnitParameters:
    """How units of speech, the codes of a quantizer, are written as tokens, and how they are interleaved with text."""

    unit_token: str = parameter(
        "<|unit{}|>",
        "The text of the token of a unit, in which `{}` stands for the unit's number. The tokenizer must have a token "
        "for each number from 0 to the last one of the codebook.",
        verbs=TOKEN_VERBS,
        stages=WORD_STAGES,
        example="<unit_{}>",
    )
    continue_token: str = parameter(
        "<|continue|>",
        "The token between two segments of an interleaved record where the kind changes: the text goes on where the "
        "units ended, or the units where the text ended.",
        verbs=DATA_VERBS,
        stages=WORD_STAGES,
        example="<continue>",
    )
    correspond_token: str = parameter(
        "<|correspond|>",
        "The token between a segment of an interleaved record and the same words in the other kind, and in spoken "
        "dialogues between speech and its words.",
        verbs=TOKEN_VERBS,
        stages=WORD_STAGES,
        example="<correspond>",
    )
    dialogue_template: str = parameter(
        "model",
        "The template of dialogues. `model` is the chat template of the model's folder. `spoken` is that of spoken "
        "dialogues, for models without one: the user's units, their transcript, the answer's text and its units, of "
        "which all but the user's units are trained, and the line end behind them. `usdm` is the same with the labels "
        "of its published script, which does not train that line end, so that not every model learns to stop.",
        choices=("model", "spoken", "usdm"),
        verbs=TOKEN_VERBS,
        stages=("SFT",),
        example="spoken",
    )
    units_per_second: float = parameter(
        50.0,
        "The rate of the units of `aligned_units`. It gives the length of records that do not say their `duration`, "
        "and is compared with that of the others.",
        above=0.0,
        maximum=100_000.0,
        unit="units per second",
        verbs=DATA_VERBS,
        stages=ALIGNED_STAGES,
        example=25.0,
    )
    interleave_segment_seconds: float = parameter(
        10.0,
        "Records of `aligned_units` of N units are cut into N // (`units_per_second` x this) + 1 segments. Around the "
        "ends of equal parts the borders are drawn from truncated normal distributions, and each moves to the nearest "
        "border between two words.",
        above=0.0,
        maximum=100_000.0,
        unit="seconds",
        verbs=DATA_VERBS,
        stages=ALIGNED_STAGES,
        example=8.0,
    )
    interleave_text_probability: float = parameter(
        0.5,
        "The probability with which a segment of an `aligned_units` record is text; otherwise it is units.",
        minimum=0.0,
        maximum=1.0,
        verbs=DATA_VERBS,
        stages=ALIGNED_STAGES,
        example=0.3,
    )
    interleave_correspond_probability: float = parameter(
        0.5,
        "The probability with which a segment of an `aligned_units` record is followed by `correspond_token` and the "
        "same words in the other kind.",
        minimum=0.0,
        maximum=1.0,
        verbs=DATA_VERBS,
        stages=ALIGNED_STAGES,
        example=0.3,
    )


@rule("unit_token", "continue_token", "correspond_token")
def unit_tokens_differ(builder: ConfigBuilder) -> None:
    """`unit_token` contains `{}` once; `continue_token` and `correspond_token` are two other tokens."""
    unit = builder["unit_token"]
    if unit.count("{}") != 1:
        builder.problem("unit_token", f"{unit!r} has no place for the number", "write for example `<|unit{}|>`")
    marks = ("continue_token", "correspond_token")
    for name in marks:
        if not builder[name]:
            builder.problem(name, "the text of a token is missing", "leave it out for the default")
    if builder[marks[0]] and builder[marks[0]] == builder[marks[1]]:
        builder.problem(marks[1], f"{builder[marks[1]]!r} is `continue_token`, too", "name two tokens")


@rule("units_per_second", "interleave_segment_seconds", stages=ALIGNED_STAGES)
def segments_have_units(builder: ConfigBuilder) -> None:
    """`interleave_segment_seconds` is at least the time of one unit at `units_per_second`."""
    rate = builder["units_per_second"]
    if rate * builder["interleave_segment_seconds"] < 1:
        what = f"a segment has less than one unit at {rate:g} units per second"
        builder.problem("interleave_segment_seconds", what, f"write at least {1 / rate:g}")


@rule("train_dataset_type", "eval_dataset_type", "eval_dataset_path", stages=ALIGNED_STAGES)
def interleaving_needs_aligned_units(builder: ConfigBuilder) -> None:
    """`units_per_second` and `interleave_...` have no effect if the types of all data are written and none is
    `aligned_units`."""
    written = [builder[name] for name in ("train_dataset_type", "eval_dataset_type") if builder.is_set(name)]
    evaluates_untold = builder["eval_dataset_path"] and not builder.is_set("eval_dataset_type")
    if not builder.is_set("train_dataset_type") or evaluates_untold:
        return  # the records tell the type
    if "aligned_units" in {kind for kinds in written for kind in kinds}:
        return
    for name in INTERLEAVING:
        if builder.differs(name):
            builder.no_effect(name, "because no data is of type aligned_units")


SECTION = section(
    UnitParameters,
    key="units",
    title="2.7 Units",
    verbs=("train",),
    rules=(unit_tokens_differ, segments_have_units, interleaving_needs_aligned_units),
)

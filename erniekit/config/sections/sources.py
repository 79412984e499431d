"""Data files, their formats and probabilities: three parallel lists, declared alike for training and evaluation."""

from __future__ import annotations

from typing import Any

from erniekit.config.parameter import ConfigBuilder
from erniekit.config.values import TEXTS, format_value

FORMATS = (
    "`erniekit` has `src` and `tgt`, `alpaca` has `instruction`, `input` and `output`, `messages` has OpenAI roles, "
    "`sharegpt` has `conversations` with `from` and `value`, `prompt_completion` has `prompt` and `completion`, `asr`"
    " has `audio_path`, a recording, and `text`, its transcript, `text` is plain text for stage PT, `aligned_units` "
    "has `units` of speech and its `words` with times for stages PT and SFT, `token_ids` for the same stages has "
    "lines of `ids` or `ids|labels` in a text file, or `input_ids` and `labels`, `codes` for stage TTS has recordings"
    " as codes of a codec, each with its `text`: a folder that `erniekit codes` wrote, or JSON lines. For stages DPO "
    "and RM the records of a format are pairs: `erniekit` with `response` and `sort`, `alpaca` with `question`, "
    "`messages` with `prompt`, `sharegpt` with `conversations`, the latter three with `chosen` and `rejected`. For "
    "stage KTO records of dialogues have `label` or `kto_tag`, true or false, too. If it is left out, a file's first "
    "records decide, and the run says so."
)
TEXT_KINDS = ("erniekit", "alpaca", "messages", "sharegpt", "prompt_completion", "asr", "text")
UNIT_KINDS = ("aligned_units", "token_ids")  # records that are tokens without a template, for PT and SFT
CODE_KIND = "codes"  # recordings as codes of a codec with their texts, for TTS


def source_kinds(*more: str) -> dict[str, Any]:
    """Return the arguments that declare a list of data formats, with `more` choices."""
    return {
        "kind": TEXTS,
        "choices": (*TEXT_KINDS, *UNIT_KINDS, CODE_KIND, *more),
        "spellings": {
            "chatml": "messages",
            "openai": "messages",
            "prompt-completion": "prompt_completion",
            "share_gpt": "sharegpt",
        },
        "example": "erniekit,alpaca",
    }


def agree_on_sources(builder: ConfigBuilder, split: str) -> None:
    """Check that paths, formats and probabilities of `split`, "train" or "eval", agree in number."""
    path, kind, probability = (f"{split}_dataset_{what}" for what in ("path", "type", "prob"))
    count = len(builder[path])
    for name in (kind, probability):
        given = len(builder[name])
        if count and given == 1:
            builder.set_silently(name, builder[name] * count)
        elif count and given != count:
            what = f"{given} values for {count} file{'s' if count > 1 else ''} of `{path}`"
            builder.problem(name, what, "write one value for each file, in the same order, or one for all")
    if sum(builder[probability]) <= 0:
        builder.problem(probability, "no file has a probability above 0", "give at least one file a positive value")
    _fit_stage(builder, kind)


def _fit_stage(builder: ConfigBuilder, name: str) -> None:
    kinds = builder[name]
    if builder.stage.reads_codes:
        codes = tuple(CODE_KIND if kind == "erniekit" else kind for kind in kinds)
        builder.change(name, codes, f"stage {builder['stage']} reads codes of recordings")
        if others := sorted({*codes} - {CODE_KIND}):
            what = f"stage {builder['stage']} reads codes of recordings, not {format_value(others)}"
            builder.problem(name, what, "write `codes`, the type of what `erniekit codes` wrote")
    elif CODE_KIND in kinds:
        what = f"stage {builder['stage']} cannot read codes of recordings"
        builder.problem(name, what, "write `stage: TTS` to train a model that speaks")
    elif "packed" in kinds:  # the folder records its format
        return
    elif builder.stage.reads_text:
        plain = tuple("text" if kind == "erniekit" else kind for kind in kinds)
        builder.change(name, plain, "stage PT reads plain text")
        dialogues = sorted(set(plain) - {"text", *UNIT_KINDS})
        if dialogues:
            builder.problem(name, f"stage PT cannot read {format_value(dialogues)}", "write `text`, or `stage: SFT`")
    elif builder.stage.reads_pairs and (units := sorted(set(UNIT_KINDS) & set(kinds))):
        what = f"stage {builder['stage']} reads pairs of answers, not {format_value(units)}"
        builder.problem(name, what, "write `stage: PT` or `stage: SFT`")
    elif builder.stage.reads_pairs and "asr" in kinds:
        what = f"stage {builder['stage']} reads pairs of answers, and `asr` has one transcript"
        builder.problem(name, what, "write `messages` for records of `prompt` with `audios`, `chosen` and `rejected`")
    elif builder.stage.reads_pairs and "prompt_completion" in kinds:
        what = f"stage {builder['stage']} reads pairs of answers, and `prompt_completion` has one answer"
        builder.problem(name, what, "write `messages` for records of `prompt`, `chosen` and `rejected`")
    elif builder.stage.reads_verdicts and (others := sorted({*UNIT_KINDS, "asr"} & {*kinds})):
        what = f"stage {builder['stage']} reads answers with a verdict, not {format_value(others)}"
        builder.problem(name, what, "write the format of dialogues with `label: true` or `false`")
    elif "text" in kinds:
        builder.problem(
            name,
            f"stage {builder['stage']} cannot read plain text",
            "write the format of its dialogues, or `stage: PT`",
        )

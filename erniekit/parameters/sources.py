"""What training and evaluation share: data files, their formats and probabilities, written as three parallel lists."""

from __future__ import annotations

from typing import Any

from erniekit.parameters.draft import ConfigBuilder
from erniekit.parameters.values import TEXTS, format_value

FORMATS = (
    "`erniekit` has `src` and `tgt`, `alpaca` has `instruction`, `input` and `output`, `messages` has OpenAI roles, "
    "`text` is plain text for stage PT. For stage DPO the records of a format are pairs: `erniekit` with `response` "
    "and `sort`, `alpaca` with `question`, `messages` with `prompt`, the latter two with `chosen` and `rejected`."
)


def source_kinds(*more: str) -> dict[str, Any]:
    """The declaration of a list of data formats, with `more` of them."""
    return {
        "kind": TEXTS,
        "choices": ("erniekit", "alpaca", "messages", "text", *more),
        "spellings": {"chatml": "messages", "openai": "messages"},
        "example": "erniekit,alpaca",
    }


def agree_on_sources(builder: ConfigBuilder, split: str) -> None:
    """Check that paths, formats and probabilities of `split` ("train" or "eval") agree, and give every path its own."""
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
    if "packed" in kinds:  # the folder itself says what it holds
        return
    if builder["stage"] == "PT":
        plain = tuple("text" if kind == "erniekit" else kind for kind in kinds)
        builder.change(name, plain, "stage PT reads plain text")
        dialogues = sorted(set(plain) - {"text"})
        if dialogues:
            builder.problem(name, f"stage PT cannot read {format_value(dialogues)}", "write `text`, or `stage: SFT`")
    elif "text" in kinds:
        builder.problem(
            name,
            f"stage {builder['stage']} cannot read plain text",
            "write the format of its dialogues, or `stage: PT`",
        )

"""What training and evaluation share: data files, their formats and probabilities, written as three parallel lists."""

from __future__ import annotations

from typing import Any

from erniekit.parameters.draft import Draft
from erniekit.parameters.values import TEXTS, shown

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


def agree_on_sources(draft: Draft, split: str) -> None:
    """Check that paths, formats and probabilities of `split` ("train" or "eval") agree, and give every path its own."""
    path, kind, probability = (f"{split}_dataset_{what}" for what in ("path", "type", "prob"))
    count = len(draft[path])
    for name in (kind, probability):
        given = len(draft[name])
        if count and given == 1:
            draft.set_silently(name, draft[name] * count)
        elif count and given != count:
            what = f"{given} values for {count} file{'s' if count > 1 else ''} of `{path}`"
            draft.problem(name, what, "write one value for each file, in the same order, or one for all")
    if sum(draft[probability]) <= 0:
        draft.problem(probability, "no file has a probability above 0", "give at least one file a positive value")
    _fit_stage(draft, kind)


def _fit_stage(draft: Draft, name: str) -> None:
    kinds = draft[name]
    if "packed" in kinds:  # the folder itself says what it holds
        return
    if draft["stage"] == "PT":
        plain = tuple("text" if kind == "erniekit" else kind for kind in kinds)
        draft.change(name, plain, "stage PT reads plain text")
        dialogues = sorted(set(plain) - {"text"})
        if dialogues:
            draft.problem(name, f"stage PT cannot read {shown(dialogues)}", "write `text`, or `stage: SFT`")
    elif "text" in kinds:
        draft.problem(
            name, f"stage {draft['stage']} cannot read plain text", "write the format of its dialogues, or `stage: PT`"
        )

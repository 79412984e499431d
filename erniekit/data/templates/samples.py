"""Make samples of dialogues: one of each, or one of each trained answer where a template rewrites earlier turns.

Templates of models that think drop the thoughts of earlier turns. What the model reads before its second answer is then
not what it said in its first, so the two cannot be trained in one sample: each answer becomes a sample of its own, with
the history as the template renders it for that turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from erniekit.data.conversation import Conversation
from erniekit.data.templates.ernie import RewritesTurnsError, Segment, Template, TemplateRefusedError


class RenderedSample(NamedTuple):
    """The segments of a sample, and the dialogue that they render."""

    conversation: Conversation
    segments: list[Segment]


def render_samples(
    template: Template, conversations: Sequence[Conversation], split: bool | None
) -> list[list[RenderedSample] | TemplateRefusedError]:
    """Return the samples of each dialogue, or why the template refuses it.

    Args:
        split: make one sample of each trained answer always (True), where the template rewrites earlier turns (None),
            or never (False): such a dialogue is refused then.
    """
    groups = [each.split_answers() if split else [each] for each in conversations]
    results = _render_groups(template, groups)
    if split is None:
        again = [number for number, result in enumerate(results) if isinstance(result, RewritesTurnsError)]
        parts = _render_groups(template, [conversations[number].split_answers() for number in again])
        for number, result in zip(again, parts, strict=True):
            results[number] = result
    return [_with_advice(result) if isinstance(result, RewritesTurnsError) else result for result in results]


def _with_advice(error: RewritesTurnsError) -> RewritesTurnsError:
    return RewritesTurnsError(f"{error}. Without split_multi_turn: false each answer becomes a sample of its own")


def _render_groups(
    template: Template, groups: Sequence[Sequence[Conversation]]
) -> list[list[RenderedSample] | TemplateRefusedError]:
    rendered = iter(template.render_many([each for group in groups for each in group]))
    results: list[list[RenderedSample] | TemplateRefusedError] = []
    for group in groups:
        outcomes = [(each, next(rendered)) for each in group]
        refused = next((outcome for _, outcome in outcomes if isinstance(outcome, TemplateRefusedError)), None)
        samples = [RenderedSample(each, outcome) for each, outcome in outcomes if isinstance(outcome, list)]
        results.append(samples if refused is None else refused)
    return results

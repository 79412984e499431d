"""A prompt with its two answers as one sample, so that the prompt is read once.

With prompt tokens p[0..n-1], chosen c[0..a-1] and rejected r[0..b-1] a sample is

    input_ids  p[0..n-2]  p[n-1] c[0..a-2]  p[n-1] r[0..b-2]
    labels     -100 ..    c[0..a-1]         r[0..b-1]

The prompt's last token stands in both branches, because it has to predict two different tokens. Positions go on from
the prompt in both (`collate.collate`), and neither branch sees the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from erniekit.data.conversation import ASSISTANT, Conversation, Preference
from erniekit.data.formats.problems import MalformedError
from erniekit.data.templates.ernie import (
    IGNORE_INDEX,
    PairOffsets,
    Sample,
    Segment,
    Template,
    TemplateRefusedError,
    join_segments,
    length_to_last_target,
)
from erniekit.data.tokenizers.tokenizer import Tokenizer


class EncodedAnswer(NamedTuple):
    """Tokens of an answer, and beside each the target it is, or -100 (turns of the user in it)."""

    tokens: Sequence[int]
    targets: Sequence[int]


class RenderedPair(NamedTuple):
    """Segments of the prompt, up to the header of the answer, and of both answers."""

    prompt: list[Segment]
    chosen: list[Segment]
    rejected: list[Segment]

    @property
    def segments(self) -> list[Segment]:
        return [*self.prompt, *self.chosen, *self.rejected]


def render_pair(template: Template, preference: Preference) -> RenderedPair:
    """The text of a pair, rendered as the two dialogues that it stands for.

    Raises:
        TemplateRefusedError: the template refuses one of them, or does not begin both in the same way.
    """
    shared = 1 + 2 * sum(turn.role == ASSISTANT for turn in preference.prompt.turns)
    chosen, rejected = (
        template.render(Conversation(preference.prompt.turns + answer, preference.prompt.system))
        for answer in (preference.chosen, preference.rejected)
    )
    if chosen[:shared] != rejected[:shared]:  # with another time in it, for example
        raise TemplateRefusedError("chat_template: it renders the same prompt in two ways, one before each answer")
    return RenderedPair(chosen[:shared], chosen[shared:], rejected[shared:])


def assemble_pair(
    rendered: RenderedPair, encoded: Sequence[Sequence[int]], template: Template, score_difference: float | None
) -> tuple[Sample, int]:
    """The sample of a rendered pair, whose segments are encoded in their order, and the tokens of its prompt.

    Raises:
        MalformedError: the tokenizer leaves nothing of a part, or makes the same tokens of both answers.
    """
    first, second = len(rendered.prompt), len(rendered.prompt) + len(rendered.chosen)
    prompt = [token for ids in encoded[:first] for token in ids]
    chosen = _answer(rendered.chosen, encoded[first:second], template)
    rejected = _answer(rendered.rejected, encoded[second:], template)
    for name, tokens in (("prompt", prompt), ("chosen", chosen.tokens), ("rejected", rejected.tokens)):
        if not tokens:
            raise MalformedError(name, "text that leaves a token", "none: the tokenizer drops every character")
    if chosen.tokens == rejected.tokens:
        raise MalformedError("rejected", "another answer than chosen", "the same tokens")
    return join_pair(prompt, chosen, rejected, score_difference), len(prompt)


def _answer(segments: Sequence[Segment], encoded: Sequence[Sequence[int]], template: Template) -> EncodedAnswer:
    """An answer up to its last target: what comes after cannot change the loss."""
    tokens, targets = join_segments(segments, encoded, template)
    end = length_to_last_target(targets)
    return EncodedAnswer(tokens[:end], targets[:end])


def encode_pair(template: Template, tokenizer: Tokenizer, preference: Preference) -> Sample:
    """One pair as a sample, as `template.encode_sample` does it for a dialogue."""
    pair = render_pair(template, preference)
    encoded = tokenizer.encode_batch([segment.text for segment in pair.segments])
    return assemble_pair(pair, encoded, template, preference.score_difference)[0]


def join_pair(
    prompt: Sequence[int], chosen: EncodedAnswer, rejected: EncodedAnswer, score_difference: float | None = None
) -> Sample:
    """The sample of a pair of n, a and b tokens; n - 1 + a + b positions."""
    *before, last = prompt
    input_ids = [*before, last, *chosen.tokens[:-1], last, *rejected.tokens[:-1]]
    labels = [IGNORE_INDEX] * len(before) + [*chosen.targets, *rejected.targets]
    start = len(before)
    difference = math.nan if score_difference is None else score_difference
    return Sample(
        np.array(input_ids, np.int32),
        np.array(labels, np.int32),
        PairOffsets(start, start + len(chosen.tokens), difference),
    )

"""Encode a prompt with its two answers as one sample, so that the model reads the prompt once.

With prompt tokens p[0..n-1], chosen c[0..a-1] and rejected r[0..b-1] a sample is

    input_ids  p[0..n-2]  p[n-1] c[0..a-2]  p[n-1] r[0..b-2]
    labels     -100 ..    c[0..a-1]         r[0..b-1]

The prompt's last token is in both branches, because it predicts two different tokens. In both branches positions
continue from the prompt (`data.collate`), and neither branch attends to the other.

A layer that attends to a window counts the positions of the row, in which the rejected answer is further from the
prompt than it is in a dialogue of its own. So a pair of more positions than the window has its prompt twice, as two
documents, p c and p r.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from erniekit.data.batch import Batch, array_spec
from erniekit.data.conversation import ASSISTANT, Conversation, Preference, Turn
from erniekit.data.formats.problems import NothingToTrainError
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
    """Tokens of an answer, and for each its target: itself, or -100 in turns of the user."""

    tokens: Sequence[int]
    targets: Sequence[int]


class PairLayout(NamedTuple):
    """How a pair is laid out as a sample.

    Attributes:
        cut_at: of an answer with a verdict, whose second answer is one to another prompt: the sample has no more tokens
            than this because of that answer, of which at least one stays, and which may be equal to the first.
        scored: the answers are read as a whole and scored behind their last tokens; no token is predicted.
        window: a pair of more positions has its prompt twice; None: every pair has it once.
    """

    cut_at: int | None = None
    scored: bool = False
    window: int | None = None


PAIRS = PairLayout()


class RenderedPair(NamedTuple):
    """Text segments of the prompt, up to the header of the answer, and of both answers."""

    prompt: list[Segment]
    chosen: list[Segment]
    rejected: list[Segment]

    @property
    def segments(self) -> list[Segment]:
        return [*self.prompt, *self.chosen, *self.rejected]


def render_pairs(template: Template, preferences: Sequence[Preference]) -> list[RenderedPair | TemplateRefusedError]:
    """Render pairs as their two dialogues, or return why the template refuses one of them."""
    dialogues = [
        Conversation(each.prompt.turns + answer, each.prompt.system)
        for each in preferences
        for answer in (each.chosen, each.rejected)
    ]
    rendered = template.render_many(dialogues)
    return [_join_dialogues(each, *rendered[2 * number : 2 * number + 2]) for number, each in enumerate(preferences)]


def render_pair(template: Template, preference: Preference) -> RenderedPair:
    """Render a pair as its two dialogues.

    Raises:
        TemplateRefusedError: the template rejects one of them, or renders the common prompt in two ways.
    """
    (rendered,) = render_pairs(template, [preference])
    if isinstance(rendered, TemplateRefusedError):
        raise rendered
    return rendered


def _join_dialogues(
    preference: Preference,
    chosen: list[Segment] | TemplateRefusedError,
    rejected: list[Segment] | TemplateRefusedError,
) -> RenderedPair | TemplateRefusedError:
    if isinstance(chosen, TemplateRefusedError):
        return chosen
    if isinstance(rejected, TemplateRefusedError):
        return rejected
    prompt, first = _split_prompt(chosen, preference.chosen)
    other_prompt, second = _split_prompt(rejected, preference.rejected)
    if prompt != other_prompt:  # for example, because it contains the time, or thoughts of one answer's first turn
        return TemplateRefusedError("chat_template: it renders the same prompt in two ways, one before each answer")
    return RenderedPair(prompt, first, second)


def _split_prompt(segments: list[Segment], answer: tuple[Turn, ...]) -> tuple[list[Segment], list[Segment]]:
    """Split off what an answer adds: its assistant's turns, and the segments between them."""
    added = 2 * sum(turn.role == ASSISTANT for turn in answer) - 1
    return segments[:-added], segments[-added:]


def assemble_pair(
    rendered: RenderedPair,
    encoded: Sequence[Sequence[int]],
    template: Template,
    score_difference: float | None,
    layout: PairLayout = PAIRS,
) -> tuple[Sample, int]:
    """Build the sample of a rendered pair from its encoded segments; return it and the number of prompt tokens.

    Raises:
        NothingToTrainError: the tokenizer drops a prompt or answer completely, or gives both answers the same tokens.
    """
    first, second = len(rendered.prompt), len(rendered.prompt) + len(rendered.chosen)
    prompt = [token for ids in encoded[:first] for token in ids]
    chosen = _answer(rendered.chosen, encoded[first:second], template)
    rejected = _answer(rendered.rejected, encoded[second:], template)
    for name, tokens in (("prompt", prompt), ("chosen", chosen.tokens), ("rejected", rejected.tokens)):
        if not tokens:
            raise NothingToTrainError(name, "text that leaves a token", "none: the tokenizer drops every character")
    if layout.cut_at is not None:
        taken = len(prompt) - 1 + len(chosen.tokens)
        once = min(layout.cut_at, layout.window or layout.cut_at) - taken
        twice = layout.cut_at - taken - (len(prompt) - 1)
        room = max(1, once, twice)
        rejected = EncodedAnswer(rejected.tokens[:room], rejected.targets[:room])
    elif chosen.tokens == rejected.tokens:
        raise NothingToTrainError("rejected", "another answer than chosen", "the same tokens")
    join = join_scored if layout.scored else join_pair
    return join(prompt, chosen, rejected, score_difference, layout.window), len(prompt)


def _answer(segments: Sequence[Segment], encoded: Sequence[Sequence[int]], template: Template) -> EncodedAnswer:
    """Return an answer up to its last target: later tokens cannot change the loss."""
    tokens, targets = join_segments(segments, encoded, template)
    end = length_to_last_target(targets)
    return EncodedAnswer(tokens[:end], targets[:end])


def encode_pair(template: Template, tokenizer: Tokenizer, preference: Preference) -> Sample:
    """Encode one pair as a sample, as `template.encode_sample` does for a dialogue."""
    pair = render_pair(template, preference)
    encoded = tokenizer.encode_batch([segment.text for segment in pair.segments])
    return assemble_pair(pair, encoded, template, preference.score_difference)[0]


def join_pair(
    prompt: Sequence[int],
    chosen: EncodedAnswer,
    rejected: EncodedAnswer,
    score_difference: float | None = None,
    window: int | None = None,
) -> Sample:
    """Join a pair of n, a and b tokens into a sample of n - 1 + a + b positions.

    Args:
        window: if these are more, the prompt is there twice, in 2 (n - 1) + a + b positions; see `PairLayout`.
    """
    first, second = (_Branch([prompt[-1], *each.tokens[:-1]], each.targets) for each in (chosen, rejected))
    return _join(prompt[:-1], first, second, score_difference, window)


def join_scored(
    prompt: Sequence[int],
    chosen: EncodedAnswer,
    rejected: EncodedAnswer,
    score_difference: float | None = None,
    window: int | None = None,
) -> Sample:
    """Join a pair of n, a and b tokens into a sample of n + 1 + a + b positions whose answers are scored.

    Both answers begin with the prompt's last token, as in `join_pair`, and are read to their last tokens. These are the
    only ones with a label, themselves, which marks where the score stands.
    """
    first, second = (
        _Branch([prompt[-1], *each.tokens], [IGNORE_INDEX] * len(each.tokens) + [each.tokens[-1]])
        for each in (chosen, rejected)
    )
    return _join(prompt[:-1], first, second, score_difference, window)


class _Branch(NamedTuple):
    """The positions of an answer, of which the first holds the prompt's last token."""

    input_ids: Sequence[int]
    labels: Sequence[int]


def _join(
    before: Sequence[int], chosen: _Branch, rejected: _Branch, score_difference: float | None, window: int | None
) -> Sample:
    """Join the branches behind the prompt without its last token, which the second has again where `window` asks."""
    end = len(before) + len(chosen.input_ids)  # of the chosen answer
    twice = window is not None and end + len(rejected.input_ids) > window
    again = before if twice else ()
    difference = math.nan if score_difference is None else score_difference
    unlabelled = [IGNORE_INDEX] * len(before)
    return Sample(
        np.array([*before, *chosen.input_ids, *again, *rejected.input_ids], np.int32),
        np.array([*unlabelled, *chosen.labels, *unlabelled[: len(again)], *rejected.labels], np.int32),
        PairOffsets(len(before), end + len(again), difference),
        documents=(end,) if twice else (),
    )


def first_answers(batch: Batch, multiple_of: int = 1) -> Batch:
    """Return a batch of pairs without the positions of the second answers, whose pairs and samples are the same.

    Args:
        multiple_of: the length of rows is a multiple of it, as that of the batch is.
    """
    assert batch.pairs is not None, "only pairs have second answers"
    ends_BS, kept_BS = batch.document_ends, batch.is_token.copy()
    for row, position in zip(*np.nonzero(batch.pairs.answers % 2 == 0), strict=True):
        second = ends_BS[row, position]  # the first answer ends where the second begins
        kept_BS[row, second : ends_BS[row, second]] = False
    lengths_B = kept_BS.sum(axis=1)
    longest = max(1, int(lengths_B.max(initial=0)))
    order_BS = np.argsort(~kept_BS, axis=1, kind="stable")[:, : longest + -longest % multiple_of]
    is_padding_BS = np.arange(order_BS.shape[1]) >= lengths_B[:, None]
    rows_B1 = np.arange(len(order_BS))[:, None]
    arrays = dict(batch.arrays)
    for name, array in batch.arrays.items():
        if (spec := array_spec(name)).axes.startswith("BS"):
            arrays[name] = array[rows_B1, order_BS]
            arrays[name][is_padding_BS] = spec.pad
    before = np.pad(np.cumsum(kept_BS, axis=1), [(0, 0), (1, 0)])  # kept positions before each
    moved_BS = np.where(is_padding_BS, lengths_B[:, None], before[rows_B1, ends_BS[rows_B1, order_BS]])
    arrays["startend_row_indices"] = moved_BS[:, None, :, None].astype(np.int32)
    targets = int(np.count_nonzero(arrays["labels"] != IGNORE_INDEX))
    return replace(batch, arrays=arrays, token_count=int(lengths_B.sum()), target_count=targets)

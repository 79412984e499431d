"""A batch as rows of documents: what the model reads, which of it is trained, and where documents begin and end."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from erniekit.data.ar_nar_codes import ArNarCodes
from erniekit.data.batch import Batch
from erniekit.data.dataset import Dataset
from erniekit.data.masked_codes import MaskedCodes
from erniekit.data.media.clip import PlacedClip
from erniekit.data.media.errors import describe_clip
from erniekit.data.templates.ernie import IGNORE_INDEX
from erniekit.data.tokenizers.tokenizer import Tokenizer
from erniekit.runners.preview_codes import stretches
from erniekit.terminal import escape_control_characters


class Stretch(NamedTuple):
    """Tokens that follow each other, as text, and whether the model is trained to say them."""

    trained: bool
    text: str


class Part(NamedTuple):
    """A part of a document. `name`: "chosen" or "rejected" for an answer of a pair; "desirable", "undesirable" or
    "to another prompt" for one with a verdict; otherwise ""."""

    name: str
    stretches: list[Stretch]


class PreviewedDocument(NamedTuple):
    """One document, or one pair.

    Attributes:
        location: where its record is: file:line.
        start, end: its positions in the row, the end excluded.
        targets: labels of each answer of a pair, or of the document.
    """

    location: str
    start: int
    end: int
    targets: list[int]
    parts: list[Part]


class PreviewedRow(NamedTuple):
    """A row of a batch with its first documents.

    Attributes:
        what: "documents", "pairs" or "answers".
        total: how many of them the row has in all.
        positions: how many positions they fill.
        padding: how many positions follow.
    """

    what: str
    total: int
    positions: int
    padding: int
    documents: list[PreviewedDocument]


def previewed_rows(
    batch: Batch, tokenizer: Tokenizer, dataset: Dataset, *, rows: int = 1, documents: int = 8
) -> list[PreviewedRow]:
    """Return the first documents of the first rows of a batch.

    Where a label differs from the token that is read next, both are there, the label first.
    """
    return [_row(batch, tokenizer, dataset, row, documents) for row in range(min(rows, len(batch.input_ids)))]


def _row(batch: Batch, tokenizer: Tokenizer, dataset: Dataset, row: int, documents: int) -> PreviewedRow:
    spans = list(_documents(batch, row) if batch.pairs is None else _pairs(batch, row, dataset))
    filled = spans[-1][1] if spans else 0
    ends = list(accumulate(int(dataset.lengths[index]) for index in batch.samples[row]))  # one may be a pack
    shown = []
    for start, end in spans[:documents]:
        index = batch.samples[row][bisect_right(ends, start)]
        sample = dataset.sample(index)
        decode = _decoder(tokenizer, dataset, sample.clips)
        answers = [slice(start, end)]
        if sample.pair is not None:
            first_end = sample.documents[0] if sample.documents else sample.pair.rejected  # else the prompt comes again
            answers = [slice(start + sample.pair.chosen, start + first_end)]
            answers += [slice(start + sample.pair.rejected, end)]
        if batch.codes_view is not None:
            assert isinstance(dataset.drawing, MaskedCodes | ArNarCodes), "which make batches of codes"
            pieces = stretches(batch, row, start, end, decode, dataset.drawing)
            parts = [Part("", [Stretch(trained, text) for trained, text in pieces])]
        elif sample.pair is None:
            parts = [Part("", _document(batch, decode, row, start, end))]
        else:
            names = ("chosen", "rejected")
            if dataset.verdicts:
                verdict = "desirable" if sample.pair.score_difference > 0 else "undesirable"
                names = (verdict, "to another prompt")
            parts = _pair(batch, decode, row, start, answers, names)
        location = escape_control_characters(dataset.location(index))
        targets = [_targets(batch, row, answer) for answer in answers]
        shown.append(PreviewedDocument(location, start, end, targets, parts))
    what = "documents" if batch.pairs is None else "answers" if dataset.verdicts else "pairs"
    return PreviewedRow(what, len(spans), filled, batch.input_ids.shape[1] - filled, shown)


def _targets(batch: Batch, row: int, part: slice) -> int:
    """The number of labels of some positions."""
    view = batch.codes_view
    of_codes = 0 if view is None else int((view.labels[row, part] != IGNORE_INDEX).sum())
    return int((batch.labels[row, part] != IGNORE_INDEX).sum()) + of_codes


def _decoder(tokenizer: Tokenizer, dataset: Dataset, clips: Sequence[PlacedClip]) -> Callable[[list[int]], str]:
    """A function that decodes the tokens of a sample from left to right: all placeholders of a clip become its name."""
    left = iter(clips)
    audio = dataset.audio

    def decode(tokens: list[int]) -> str:
        parts = []
        for sound, own in groupby(tokens, key=lambda token: audio is not None and token == audio.placeholder_id):
            run = list(own)
            if not sound or audio is None:
                parts.append(tokenizer.decode(run, skip_special_tokens=False))
                continue
            count = 0
            while count < len(run):
                clip = next(left)
                count += clip.tokens
                seconds = clip.length / audio.sampling_rate
                parts.append(f"<audio {describe_clip(clip.clip)}: {seconds:.2f} s, {clip.tokens:,} tokens>")
        return escape_control_characters("".join(parts))

    return decode


def _pair(
    batch: Batch,
    decode: Callable[[list[int]], str],
    row: int,
    start: int,
    answers: list[slice],
    names: tuple[str, str],
) -> list[Part]:
    """The prompt, as both answers read it, and each answer with its name."""
    prompt = batch.input_ids[row, start : answers[0].start + 1].tolist()
    parts = [Part("", [Stretch(False, decode(prompt))])]
    for name, answer in zip(names, answers, strict=True):
        parts.append(Part(name, _document(batch, decode, row, answer.start, answer.stop, beginning=False)))
    return parts


def _documents(batch: Batch, row: int) -> Iterator[tuple[int, int]]:
    """First position and end of each document, read from the attention indices, so that they are seen as they act."""
    ends = batch.startend_row_indices[row, 0, :, 0]
    start = 0
    while start < len(ends) and ends[start] > start:
        yield start, int(ends[start])
        start = int(ends[start])


def _pairs(batch: Batch, row: int, dataset: Dataset) -> Iterator[tuple[int, int]]:
    """First position and end of each pair."""
    start = 0
    for index in batch.samples[row]:
        end = start + int(dataset.lengths[index])
        yield start, end
        start = end


def _document(
    batch: Batch, decode: Callable[[list[int]], str], row: int, start: int, end: int, *, beginning: bool = True
) -> list[Stretch]:
    tokens = _tokens(batch, row, start, end, beginning)
    return [
        Stretch(trained, decode([token for _, token in own]))
        for trained, own in groupby(tokens, key=lambda pair: pair[0])
    ]


def _tokens(batch: Batch, row: int, start: int, end: int, beginning: bool) -> Iterator[tuple[bool, int]]:
    """(trained, token id) in reading order: each position's label, and the next token where it is not the same.

    `beginning`: with the first token, for which there is no label.
    """
    if beginning:
        yield False, int(batch.input_ids[row, start])
    for position in range(start, end):
        label = int(batch.labels[row, position])
        following = int(batch.input_ids[row, position + 1]) if position + 1 < end else None
        if label != IGNORE_INDEX:
            yield True, label
        if following is not None and following != label:
            yield False, following

"""A document of codes as text: its tokens, and how long its stretches of frames are and what is predicted there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from erniekit.data.ar_nar_codes import ArNarCodes
from erniekit.data.batch import Batch, CodePart, CodeTargets
from erniekit.data.masked_codes import MaskedCodes
from erniekit.data.templates.ernie import IGNORE_INDEX


def stretches(
    batch: Batch,
    row: int,
    start: int,
    end: int,
    decode: Callable[[list[int]], str],
    drawing: MaskedCodes | ArNarCodes,
) -> Iterator[tuple[bool, str]]:
    """Yield whether a stretch of a document is predicted, and its text; frames are `<codes 2.1 s, level 0>`.

    Args:
        start, end: the positions of the document in its row.
        decode: makes text of tokens.
    """
    view = batch.codes_view
    assert view is not None, "the batch has codes"
    reads_codes = (view.codes[row, start:end] >= 0).any(axis=-1)
    borders = start + np.flatnonzero(np.diff(reads_codes)) + 1
    for first, last in zip([start, *borders.tolist()], [*borders.tolist(), end], strict=True):
        if reads_codes[first - start]:
            yield from _frames(view, row, slice(first, last), drawing, begins=first == start)
        else:
            yield from _tokens(batch, row, first, last, start, decode)
    if batch.labels[row, end - 1] != IGNORE_INDEX:  # predicted, and nothing follows
        yield True, decode([int(batch.labels[row, end - 1])])


def _tokens(
    batch: Batch, row: int, first: int, last: int, start: int, decode: Callable[[list[int]], str]
) -> Iterator[tuple[bool, str]]:
    """Yield the tokens of a stretch, those together that the position before each predicts, or does not."""
    ids = batch.input_ids[row, first:last]
    predicted = np.array([batch.labels[row, max(start, place - 1)] for place in range(first, last)]) == ids
    if first == start:
        predicted[0] = False
    for part in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(predicted)) + 1):
        yield bool(predicted[part[0]]), decode(ids[part].tolist())


def _frames(
    view: CodeTargets, row: int, place: slice, drawing: MaskedCodes | ArNarCodes, *, begins: bool
) -> Iterator[tuple[bool, str]]:
    """Yield what a stretch of frames is.

    Args:
        begins: whether the document begins with it.
    """
    labels = view.labels[row, place] != IGNORE_INDEX
    if isinstance(drawing, MaskedCodes):
        predicted = np.flatnonzero(labels.any(axis=-1))
        prompt = int(predicted[0]) if len(predicted) else len(labels)
        if prompt:
            yield False, f"<codes {prompt / drawing.frame_rate:.1f} s prompt>"
        if prompt < len(labels):
            rest = labels[prompt:]
            seconds = len(rest) / drawing.frame_rate
            yield True, f"<codes {seconds:.1f} s, {int(rest.sum()):,} of {rest.size:,} masked>"
        return
    seconds = len(labels) / drawing.frame_rate
    assert view.part is not None
    if (view.part[row, place] == CodePart.RESPONSE).any():
        yield True, f"<codes {seconds:.1f} s, level {int(labels.any(axis=0).argmax())}>"
    else:
        predicts = bool(labels.any())
        yield predicts, f"<codes {seconds:.1f} s>" if begins else f"<codes {seconds:.1f} s prompt>"

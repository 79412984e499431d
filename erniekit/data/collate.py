"""Packs to the arrays that a model takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from erniekit.data.templates.ernie import IGNORE_INDEX, Sample


@dataclass(frozen=True, slots=True)
class PairSpans:
    """Where the answers of a micro-batch of pairs lie.

    Attributes:
        count: P, the pairs in the order of rows and of their places in them.
        answers: int32[B, S]; 2 p for a position with a label of the chosen answer of pair p, 2 p + 1 for one of the
            rejected, -1 elsewhere.
        score_differences: float32[P], NaN where the records have no scores.
    """

    count: int
    answers: np.ndarray
    score_differences: np.ndarray


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of B rows, each a pack of documents, padded to the longest row (S positions).

    Attributes:
        input_ids: int64[B, S].
        position_ids: int64[B, S], from 0 in each document; 0 in the padding. In both answers of a pair they go on from
            its prompt.
        labels: int64[B, S], already shifted; -100 where nothing is trained.
        startend_row_indices: int32[B, 1, S, 1], FlashMask's causal form: for each key column the first query row that
            may not see it, the end of its document. The columns of a pair's chosen answer end where its rejected one
            begins. The columns of the padding hold its start: nothing sees them, and its rows see nothing.
        samples: dataset indices of the documents in each row; an empty row holds padding only.
        token_count: positions without padding.
        target_count: positions with a label.
        pairs: None where the samples are documents.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    labels: np.ndarray
    startend_row_indices: np.ndarray
    samples: tuple[tuple[int, ...], ...]
    token_count: int
    target_count: int
    pairs: PairSpans | None = None

    @property
    def document_ends(self) -> np.ndarray:
        """int32[B, S]: the index just after each position's document (of a chosen answer, just after that); in the
        padding the start of the padding."""
        return self.startend_row_indices[:, 0, :, 0]

    @property
    def is_token(self) -> np.ndarray:
        """bool[B, S]: false in the padding."""
        return self.document_ends > np.arange(self.input_ids.shape[1])

    def padded(self, rows: int, length: int) -> Batch:
        """The same with padding up to a shape [rows, length] that is at least its own."""
        own_rows, own_length = self.input_ids.shape
        more = (0, rows - own_rows), (0, length - own_length)
        ends = np.pad(self.document_ends, more)
        ends[:own_rows, own_length:] = self.document_ends[:, -1:]  # where the padding starts
        pairs = self.pairs and replace(self.pairs, answers=np.pad(self.pairs.answers, more, constant_values=-1))
        return replace(
            self,
            input_ids=np.pad(self.input_ids, more),
            position_ids=np.pad(self.position_ids, more),
            labels=np.pad(self.labels, more, constant_values=IGNORE_INDEX),
            startend_row_indices=ends[:, None, :, None],
            samples=(*self.samples, *((),) * (rows - own_rows)),
            pairs=pairs,
        )


def collate(
    rows: Sequence[Sequence[Sample]], indices: Sequence[Sequence[int]], pad_id: int, *, pairs: bool = False
) -> Batch:
    """Lay the documents (or pairs) of each row end to end.

    Args:
        rows: the samples of each row; a row may be empty, then it is padding.
        indices: their dataset indices, for messages.
        pairs: whether the samples are pairs; told apart from them, for a batch may hold none.
    """
    lengths = [[len(sample.input_ids) for sample in row] for row in rows]
    shape = (len(rows), max(1, *(sum(row) for row in lengths)))
    input_ids = np.full(shape, pad_id, np.int64)
    position_ids = np.zeros(shape, np.int64)
    labels = np.full(shape, IGNORE_INDEX, np.int64)
    document_ends = np.zeros(shape, np.int32)
    answers = np.full(shape, -1, np.int32)
    score_differences: list[float] = []
    for number, row in enumerate(rows):
        start = 0
        for sample in row:
            end = start + len(sample.input_ids)
            input_ids[number, start:end] = sample.input_ids
            labels[number, start:end] = sample.labels
            position_ids[number, start:end] = np.arange(end - start)
            document_ends[number, start:end] = end
            if sample.pair is not None:
                chosen, rejected = start + sample.pair.chosen, start + sample.pair.rejected
                position_ids[number, rejected:end] -= rejected - chosen
                document_ends[number, chosen:rejected] = rejected
                answers[number, chosen:rejected] = 2 * len(score_differences)
                answers[number, rejected:end] = 2 * len(score_differences) + 1
                score_differences.append(sample.pair.score_difference)
            start = end
        document_ends[number, start:] = start
    return Batch(
        input_ids=input_ids,
        position_ids=position_ids,
        labels=labels,
        startend_row_indices=document_ends[:, None, :, None],
        samples=tuple(tuple(int(index) for index in row) for row in indices),
        token_count=sum(map(sum, lengths)),
        target_count=int(np.count_nonzero(labels != IGNORE_INDEX)),
        pairs=PairSpans(
            count=len(score_differences),
            answers=np.where(labels != IGNORE_INDEX, answers, -1),
            score_differences=np.array(score_differences, np.float32),
        )
        if pairs
        else None,
    )

"""Lay samples end to end in the rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from erniekit.data.batch import Batch, array_spec
from erniekit.data.templates.ernie import IGNORE_INDEX, Sample


def collate(
    rows: Sequence[Sequence[Sample]],
    indices: Sequence[Sequence[int]],
    pad_id: int,
    *,
    pairs: bool = False,
    arrays: Sequence[str] = (),
) -> Batch:
    """Build the batch of some rows of documents (or pairs), padded to the longest row.

    Args:
        rows: the samples of each row; a row may be empty, then it is padding.
        indices: their dataset indices, for messages.
        pairs: whether the samples are pairs. It is given, because a batch may hold no sample that shows it.
        arrays: the names of the further arrays that samples may have (`Sample.arrays`), given for the same reason. The
            array is padding where a sample does not have it.

    Raises:
        ValueError: a further array has no specification (`batch.ARRAY_SPECS`), or does not follow it.
    """
    lengths = [[len(sample.input_ids) for sample in row] for row in rows]
    shape = (len(rows), max(1, *(sum(row) for row in lengths)))
    input_ids = np.full(shape, pad_id, np.int64)
    position_ids = np.zeros(shape, np.int64)
    labels = np.full(shape, IGNORE_INDEX, np.int64)
    document_ends = np.zeros(shape, np.int32)
    answers = np.full(shape, -1, np.int32)
    score_differences: list[float] = []
    more = {name: _padding(name, rows, shape) for name in arrays}
    for number, row in enumerate(rows):
        start = 0
        for sample in row:
            end = start + len(sample.input_ids)
            input_ids[number, start:end] = sample.input_ids
            labels[number, start:end] = sample.labels
            for first, last in pairwise((0, *sample.documents, end - start)):
                position_ids[number, start + first : start + last] = np.arange(last - first)
                document_ends[number, start + first : start + last] = start + last
            for name, array in more.items():
                if name in sample.arrays:
                    array[number, start:end] = sample.arrays[name]
            if sample.pair is not None:
                chosen, rejected = start + sample.pair.chosen, start + sample.pair.rejected
                position_ids[number, rejected:end] -= rejected - chosen
                document_ends[number, chosen:rejected] = rejected
                answers[number, chosen:rejected] = 2 * len(score_differences)
                answers[number, rejected:end] = 2 * len(score_differences) + 1
                score_differences.append(sample.pair.score_difference)
            start = end
        document_ends[number, start:] = start
    if pairs:
        more["answers"] = np.where(labels != IGNORE_INDEX, answers, np.int32(-1))
        more["score_differences"] = np.array(score_differences, np.float32)
    return Batch(
        {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "labels": labels,
            "startend_row_indices": document_ends[:, None, :, None],
            **more,
        },
        samples=tuple(tuple(int(index) for index in row) for row in indices),
        token_count=sum(map(sum, lengths)),
        target_count=int(np.count_nonzero(labels != IGNORE_INDEX)),
    )


def _padding(name: str, rows: Sequence[Sequence[Sample]], shape: tuple[int, int]) -> np.ndarray:
    """Return padding for an array of values at positions; its other axes are as long as in the samples."""
    spec = array_spec(name)
    if not spec.axes.startswith("BS"):
        raise ValueError(f"batch array {name!r}: its axes are {spec.axes}; samples have values at positions, BS...")
    others = next((sample.arrays[name].shape[1:] for row in rows for sample in row if name in sample.arrays), None)
    return spec.full(*shape, *(others or (0,) * (len(spec.axes) - 2)))

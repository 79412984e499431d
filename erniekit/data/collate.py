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
    both_ways: bool = False,
    levels: int = 0,
) -> Batch:
    """Build the batch of some rows of documents (or pairs), padded to the longest row.

    Args:
        rows: the samples of each row; a row may be empty, then it is padding.
        indices: their dataset indices, for messages.
        pairs: whether the samples are pairs. It is given, because a batch may hold no sample that shows it.
        arrays: the names of the further arrays that samples may have (`Sample.arrays`), given for the same reason. The
            array is padding where a sample does not have it. A sample's "position_ids" take the place of those from 0.
        both_ways: whether samples may be read both ways (`Sample.causal`); the columns of all batches of a run then
            have two values, for the same reason.
        levels: the size of the axis "C" of further arrays where no sample shows it.

    Raises:
        ValueError: a further array has no specification (`batch.ARRAY_SPECS`), or does not follow it.
    """
    assert not (pairs and both_ways), "the answers of a pair are read causally"
    lengths = [[len(sample.input_ids) for sample in row] for row in rows]
    shape = (len(rows), max(1, *(sum(row) for row in lengths)))
    input_ids = np.full(shape, pad_id, np.int64)
    position_ids = np.zeros(shape, np.int64)
    labels = np.full(shape, IGNORE_INDEX, np.int64)
    document_ends = np.zeros(shape, np.int32)
    first_rows = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))  # that may see each column
    answers = np.full(shape, -1, np.int32)
    score_differences: list[float] = []
    more = {name: _padding(name, rows, shape, levels) for name in arrays}
    for number, row in enumerate(rows):
        start = 0
        for sample in row:
            end = start + len(sample.input_ids)
            input_ids[number, start:end] = sample.input_ids
            labels[number, start:end] = sample.labels
            for first, last in pairwise((0, *sample.documents, end - start)):
                position_ids[number, start + first : start + last] = np.arange(last - first)
                document_ends[number, start + first : start + last] = start + last
                if not sample.causal:
                    assert both_ways, "columns of one value are causal"
                    first_rows[number, start + first : start + last] = start + first
            if "position_ids" in sample.arrays:
                position_ids[number, start:end] = sample.arrays["position_ids"]
            for name, array in more.items():
                if name in sample.arrays:
                    array[number, start:end] = sample.arrays[name]
            begins = sample.answers
            if sample.pair is not None and not sample.documents:  # of which each has the prompt itself
                begins = (sample.pair.chosen, sample.pair.rejected)
            for first, last in pairwise((*begins, end - start)):
                position_ids[number, start + first : start + last] -= first - begins[0]
                document_ends[number, start + first : start + last] = start + last
            if sample.pair is not None:
                chosen, rejected = start + sample.pair.chosen, start + sample.pair.rejected
                answers[number, chosen:rejected] = 2 * len(score_differences)
                answers[number, rejected:end] = 2 * len(score_differences) + 1
                score_differences.append(sample.pair.score_difference)
            start = end
        document_ends[number, start:] = first_rows[number, start:] = start
    if pairs:
        more["answers"] = np.where(labels != IGNORE_INDEX, answers, np.int32(-1))
        more["score_differences"] = np.array(score_differences, np.float32)
    if "codes" in more:  # their positions read no token
        input_ids[(more["codes"] >= 0).any(axis=-1)] = pad_id
    code_labels = [more["code_labels"]] if "code_labels" in more else []
    return Batch(
        {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "labels": labels,
            "startend_row_indices": np.stack([document_ends, first_rows][: 1 + both_ways], axis=-1)[:, None],
            **more,
        },
        samples=tuple(tuple(int(index) for index in row) for row in indices),
        token_count=sum(map(sum, lengths)),
        target_count=sum(int(np.count_nonzero(each != IGNORE_INDEX)) for each in (labels, *code_labels)),
        seconds=sum(sample.seconds for row in rows for sample in row),
    )


def _padding(name: str, rows: Sequence[Sequence[Sample]], shape: tuple[int, int], levels: int) -> np.ndarray:
    """Return padding for an array of values at positions; its other axes are as long as in the samples, or `levels`."""
    spec = array_spec(name)
    if not spec.axes.startswith("BS"):
        raise ValueError(f"batch array {name!r}: its axes are {spec.axes}; samples have values at positions, BS...")
    others = next((sample.arrays[name].shape[1:] for row in rows for sample in row if name in sample.arrays), None)
    return spec.full(*shape, *(others or (levels if axis == "C" else 0 for axis in spec.axes[2:])))

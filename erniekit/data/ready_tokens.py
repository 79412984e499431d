"""Make samples of records whose tokens are ready: the documents of a pack are told apart, and labels are shifted."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from erniekit.data.formats.problems import Effect, RecordProblem
from erniekit.data.placeholders import Recordings
from erniekit.data.templates.ernie import IGNORE_INDEX, Sample
from erniekit.data.units import TokenIds

if TYPE_CHECKING:
    from erniekit.data.encode import SourceRun
    from erniekit.data.tokenize import NumberedRecord


def encode_token_ids(
    block: list[NumberedRecord], recordings: Recordings, run: SourceRun
) -> Iterator[tuple[int, Sample]]:
    """Yield the sample of each record with its line.

    A record without labels that is too long is cut into pieces, as plain texts are; one with labels is dropped, or
    refused, as `over_length` says.
    """
    del recordings
    source, settings, counts, problems, _ = run
    limit, size = settings.max_seq_len, settings.tokenizer.vocab_size
    for line, record in block:
        assert isinstance(record, TokenIds)
        if (largest := max(record.ids)) >= size:
            place = record.ids.index(largest)
            expected = f"ids from 0 to {size - 1:,}, which the tokenizer has"
            problems.add(RecordProblem(str(source.path), line, f"input_ids[{place}]", expected, f"{largest:,}"))
            continue
        sample = ready_sample(record, settings.tokenizer.bos_id)
        length = len(sample.input_ids)
        if not length:
            expected = "a target behind the first token"
            problems.add(RecordProblem(str(source.path), line, "input_ids", expected, "none", Effect.SKIP))
        elif length <= limit:
            yield line, sample
        elif record.packed:
            counts.split += 1
            yield from ((line, _piece(sample, start, limit)) for start in range(0, length, limit))
        elif settings.over_length == "error":
            expected = f"at most {limit:,} tokens (max_seq_len)"
            problems.add(RecordProblem(str(source.path), line, "length", expected, f"{length:,}", Effect.STOP))
        else:
            counts.dropped += 1


def ready_sample(record: TokenIds, bos_id: int | None) -> Sample:
    """Return the sample of a record: no document predicts the first token of the next one, nor sees anything of it.

    Args:
        bos_id: the token that begins each document of a pack; None: a record is one document.
    """
    ids = np.array(record.ids, np.int32)
    targets = np.where(np.array(record.targets, bool), ids, np.int32(IGNORE_INDEX))
    starts = np.flatnonzero(ids == bos_id).tolist() if record.packed and bos_id is not None else []
    borders = sorted({0, *starts, len(ids)})
    input_ids, labels, lengths = [], [], []
    for start, end in pairwise(borders):
        trained = np.flatnonzero(targets[start + 1 : end] != IGNORE_INDEX)
        last = start + 1 + int(trained[-1]) if len(trained) else start  # nothing behind it can change the loss
        input_ids.append(ids[start:last])
        labels.append(targets[start + 1 : last + 1])
        lengths.append(last - start)
    ends = np.cumsum([length for length in lengths if length])
    return Sample(np.concatenate(input_ids), np.concatenate(labels), documents=tuple(ends[:-1].tolist()))


def _piece(sample: Sample, start: int, limit: int) -> Sample:
    """Return up to `limit` positions of a sample; a document that is cut goes on as one of its own."""
    part = slice(start, start + limit)
    documents = tuple(place - start for place in sample.documents if start < place < start + limit)
    return Sample(sample.input_ids[part], sample.labels[part], documents=documents)

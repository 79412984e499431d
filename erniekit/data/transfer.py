"""What one process reads for others, as a message of JSON and arrays: micro-batches, and the index of a dataset.

The ranks that divide one copy of a model work on the same micro-batches, so one of them may read for all
(`distributed_dataloader`). The others plan the run from the lengths of the samples, and never see a data file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from erniekit.data.batches import Batch, PairSpans
from erniekit.data.dataset import Dataset
from erniekit.data.packed import Packed
from erniekit.data.packing import Packs
from erniekit.data.sources import Source
from erniekit.data.token_cache import TokenArrays


class Message(NamedTuple):
    """`facts` are JSON."""

    facts: Any
    arrays: Sequence[np.ndarray]


def pack_batches(batches: Sequence[Batch]) -> Message:
    """The micro-batches of a step."""
    facts, arrays = [], list[np.ndarray]()
    for batch in batches:
        facts.append([batch.samples, batch.token_count, batch.target_count, batch.pairs and batch.pairs.count])
        arrays += [batch.input_ids, batch.position_ids, batch.labels, batch.startend_row_indices]
        if batch.pairs is not None:
            arrays += [batch.pairs.answers, batch.pairs.score_differences]
    return Message(facts, arrays)


def unpack_batches(message: Message) -> list[Batch]:
    """What was given to `pack_batches`."""
    arrays = iter(message.arrays)

    def batch(samples: list[list[int]], token_count: int, target_count: int, pairs: int | None) -> Batch:
        return Batch(
            input_ids=next(arrays),
            position_ids=next(arrays),
            labels=next(arrays),
            startend_row_indices=next(arrays),
            samples=tuple(map(tuple, samples)),
            token_count=token_count,
            target_count=target_count,
            pairs=None if pairs is None else PairSpans(pairs, next(arrays), next(arrays)),
        )

    return [batch(*facts) for facts in message.facts]


def pack_index(dataset: Dataset) -> Message:
    """All of a dataset but its tokens."""
    packed = dataset.packed
    facts = {
        "sources": [[str(source.path), source.kind, source.probability] for source in dataset.sources],
        "facts": [part.facts for part in dataset.parts],
        "pad_id": dataset.pad_id,
        "fingerprint": dataset.fingerprint,
        "pairs": dataset.pairs,
        "packed": packed and [packed.batch_tokens, packed.files],
    }
    arrays = [array for part in dataset.parts for array in (part.offsets, part.lines)]
    if packed is not None:
        arrays += [packed.packs.members, packed.packs.starts, packed.file_of]
    return Message(facts, arrays)


def unpack_index(message: Message) -> Dataset:
    """The dataset that was given to `pack_index`, with lengths, counts and places, and without tokens."""
    facts, arrays = message.facts, iter(message.arrays)
    sources = [Source(Path(path), kind, probability) for path, kind, probability in facts["sources"]]
    parts = [TokenArrays(_NONE, _NONE, next(arrays), next(arrays), own) for own in facts["facts"]]
    packed = None
    if facts["packed"] is not None:
        batch_tokens, files = facts["packed"]
        packed = Packed(Packs(next(arrays), next(arrays)), batch_tokens, tuple(files), next(arrays))
    return Dataset(
        sources,
        parts,
        pad_id=facts["pad_id"],
        fingerprint=facts["fingerprint"],
        pairs=facts["pairs"],
        packed=packed,
    )


_NONE = np.empty(0, np.int32)

"""Read ahead of the training loop in threads; the order of steps never depends on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from erniekit.data.collate import Batch, PairSpans
from erniekit.data.conversation import Source
from erniekit.data.dataset import Dataset
from erniekit.data.packed import PackedIndex
from erniekit.data.packing import Packs
from erniekit.data.sampler import StepPlan
from erniekit.data.token_cache import TokenArrays


def prefetch(plan: StepPlan, start: int, workers: int, stop: int | None = None) -> Generator[list[Batch], None, None]:
    """Yield plan.micro_batches(step) for step = start, start + 1, ... (below `stop`), prepared by `workers` threads.

    With 0 workers everything happens in the caller's thread; what `plan.through` does happens there in any case. An
    exception in a worker is raised here, as it was, when the loop comes to its step.
    """
    steps = iter(count(start) if stop is None else range(start, stop))
    if workers == 0:
        for step in steps:
            yield plan.micro_batches(step)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="data") as pool:
        ahead: deque[Future[list[Batch]]] = deque()
        try:
            for step in steps:
                ahead.append(pool.submit(plan.read, step))
                if len(ahead) > workers:
                    yield plan.batch_source(ahead.popleft().result)
            while ahead:
                yield plan.batch_source(ahead.popleft().result)
        finally:  # also when the loop stops early
            for future in ahead:
                future.cancel()


# What one process reads for others, as a message of JSON and arrays: micro-batches, and the index of a dataset.
#
# The ranks that divide one copy of a model work on the same micro-batches, so one of them may read for all
# (`distributed_dataloader`). The others plan the run from the lengths of the samples, and never see a data file.


class ArrayMessage(NamedTuple):
    """`facts` are JSON."""

    metadata: Any
    arrays: Sequence[np.ndarray]


def serialize_batches(batches: Sequence[Batch]) -> ArrayMessage:
    """The micro-batches of a step."""
    metadata, arrays = [], list[np.ndarray]()
    for batch in batches:
        metadata.append([batch.samples, batch.token_count, batch.target_count, batch.pairs and batch.pairs.count])
        arrays += [batch.input_ids, batch.position_ids, batch.labels, batch.startend_row_indices]
        if batch.pairs is not None:
            arrays += [batch.pairs.answers, batch.pairs.score_differences]
    return ArrayMessage(metadata, arrays)


def deserialize_batches(message: ArrayMessage) -> list[Batch]:
    """What was given to `serialize_batches`."""
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

    return [batch(*metadata) for metadata in message.metadata]


def serialize_index(dataset: Dataset) -> ArrayMessage:
    """All of a dataset but its tokens."""
    packed = dataset.packed
    metadata = {
        "sources": [[str(source.path), source.kind, source.probability] for source in dataset.sources],
        "facts": [tokens.metadata for tokens in dataset.source_arrays],
        "pad_id": dataset.pad_id,
        "fingerprint": dataset.fingerprint,
        "pairs": dataset.pairs,
        "packed": packed and [packed.batch_tokens, packed.files],
    }
    arrays = [array for tokens in dataset.source_arrays for array in (tokens.offsets, tokens.lines)]
    if packed is not None:
        arrays += [packed.packs.members, packed.packs.starts, packed.file_of]
    return ArrayMessage(metadata, arrays)


def deserialize_index(message: ArrayMessage) -> Dataset:
    """The dataset that was given to `serialize_index`, with lengths, counts and places, and without tokens."""
    metadata, arrays = message.metadata, iter(message.arrays)
    sources = [Source(Path(path), kind, probability) for path, kind, probability in metadata["sources"]]
    source_arrays = [TokenArrays(_EMPTY, _EMPTY, next(arrays), next(arrays), own) for own in metadata["facts"]]
    packed = None
    if metadata["packed"] is not None:
        batch_tokens, files = metadata["packed"]
        packed = PackedIndex(Packs(next(arrays), next(arrays)), batch_tokens, tuple(files), next(arrays))
    return Dataset(
        sources,
        source_arrays,
        pad_id=metadata["pad_id"],
        fingerprint=metadata["fingerprint"],
        pairs=metadata["pairs"],
        packed=packed,
    )


_EMPTY = np.empty(0, np.int32)

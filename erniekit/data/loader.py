"""Read ahead of the training loop in threads, and serialise what one rank reads for others.

The order of the steps does not depend on the threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from erniekit.data.ar_nar_codes import ArNarCodes
from erniekit.data.batch import Batch
from erniekit.data.conversation import Source
from erniekit.data.dataset import Dataset
from erniekit.data.drawing import Drawing
from erniekit.data.interleave import Interleaving
from erniekit.data.masked_codes import MaskedCodes
from erniekit.data.media.clip import AudioInputs
from erniekit.data.packed import PackedIndex
from erniekit.data.packing import Packs
from erniekit.data.sampler import StepPlan
from erniekit.data.split import Split
from erniekit.data.token_cache import TokenArrays


def prefetch(plan: StepPlan, start: int, workers: int, stop: int | None = None) -> Generator[list[Batch], None, None]:
    """Yield plan.micro_batches(step) for step = start, start + 1, ... (below `stop`), prepared by `workers` threads.

    With 0 workers everything runs in the caller's thread; `plan.batch_source` always runs there. An exception in a
    worker is raised here unchanged when the loop reaches its step.
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


# Serialise what one process reads for others, micro-batches and the index of a dataset, as JSON and arrays.
#
# The ranks that divide one copy of a model work on the same micro-batches, so one of them may read for all
# (`distributed_dataloader`). The others plan the run from the lengths of the samples and open no data file.


class ArrayMessage(NamedTuple):
    """A message of JSON (`metadata`) and arrays."""

    metadata: Any
    arrays: Sequence[np.ndarray]


def serialize_batches(batches: Sequence[Batch]) -> ArrayMessage:
    """Return the micro-batches of a step as a message: the names of each one's arrays, and the arrays."""
    metadata = [
        [list(batch.arrays), batch.samples, batch.token_count, batch.target_count, batch.seconds] for batch in batches
    ]
    return ArrayMessage(metadata, [array for batch in batches for array in batch.arrays.values()])


def deserialize_batches(message: ArrayMessage) -> list[Batch]:
    """Return the micro-batches that were given to `serialize_batches`."""
    arrays = iter(message.arrays)
    return [
        Batch({name: next(arrays) for name in names}, tuple(map(tuple, samples)), *counts)
        for names, samples, *counts in message.metadata
    ]


def serialize_index(dataset: Dataset) -> ArrayMessage:
    """Return everything of a dataset except its tokens."""
    packed = dataset.packed
    metadata = {
        "sources": [[str(source.path), source.kind, source.probability, source.split] for source in dataset.sources],
        "facts": [tokens.metadata for tokens in dataset.source_arrays],
        "pad_id": dataset.pad_id,
        "fingerprint": dataset.fingerprint,
        "pairs": dataset.pairs,
        "verdicts": dataset.verdicts,
        "packed": packed and [packed.batch_tokens, packed.files],
        "drawing": dataset.drawing and [type(dataset.drawing).__name__, dataset.drawing.stored()],
    }
    arrays = [getattr(tokens, name) for tokens in dataset.source_arrays for name in _INDEX]
    if packed is not None:
        arrays += [packed.packs.members, packed.packs.starts, packed.file_of]
    return ArrayMessage(metadata, arrays)


def deserialize_index(message: ArrayMessage, audio: AudioInputs | None = None) -> Dataset:
    """Return the dataset that was given to `serialize_index`: lengths, counts and file positions, without tokens.

    Args:
        audio: that of the dataset, which every rank knows from the model.
    """
    metadata, arrays = message.metadata, iter(message.arrays)
    sources = [
        Source(Path(path), kind, probability, split=None if split is None else Split(*split))
        for path, kind, probability, split in metadata["sources"]
    ]
    source_arrays = []
    for own in metadata["facts"]:
        index: dict[str, Any] = {name: next(arrays) for name in _INDEX}
        source_arrays.append(TokenArrays(_EMPTY, _EMPTY, metadata=own, **index))
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
        verdicts=metadata["verdicts"],
        packed=packed,
        audio=audio,
        drawing=None if metadata["drawing"] is None else _drawing(*metadata["drawing"]),
    )


def _drawing(name: str, stored: list) -> Drawing:
    """Return what was sent as the name of its class and what it stores."""
    return _DRAWINGS[name](stored)


_EMPTY = np.empty(0, np.int32)
_INDEX = ("offsets", "lines", "words", "word_offsets", "spoken")  # what lengths are made of
_DRAWINGS: dict[str, Callable[[list], Drawing]] = {
    each.__name__: each.of for each in (Interleaving, MaskedCodes, ArNarCodes)
}

"""Write and read a checkpoint's tensors outside of the model: safetensors files `<stem>*.safetensors`.

They are written and read one tensor at a time, whichever ranks have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from erniekit.errors import CheckpointError, ModelFileError
from erniekit.model.local_tensors import FullTensors
from erniekit.model.storage.precision import to_stored
from erniekit.model.storage.safetensors import SafetensorsFile, StoredTensor, write_stored
from erniekit.model.storage.shards import split_into_shards

MAX_FILE_BYTES = 5 * 10**9


class TensorFiles(NamedTuple):
    """Tensors on disk.

    Attributes:
        names: of all tensors; empty if there are no files.
        read: reads one of them; bfloat16 as float32, without loss.
        metadata: of each file.
    """

    names: tuple[str, ...]
    read: Callable[[str], np.ndarray]
    metadata: tuple[Mapping[str, str], ...] = ()


def _holds_nothing(name: str) -> np.ndarray:
    raise KeyError(name)


NO_TENSORS = TensorFiles((), _holds_nothing)


def write_tensors(
    folder: Path | None,
    stem: str,
    tensors: FullTensors,
    metadata: Mapping[str, str] | None = None,
    *,
    files: int = 1,
) -> None:
    """Write `<stem>.safetensors`, or `<stem>-0000k-of-0000n.safetensors` if one file would be too large.

    One tensor at a time is in memory. The files are not synced to disk.

    Args:
        folder: None on ranks that only send their shards.
        metadata: of each file.
        files: write so many files of about the same size, or one for each tensor if there are fewer.
    """
    if folder is None:
        for name in tensors.names:
            tensors.read(name)
        return
    stored = {name: tensors.stored(name) for name in tensors.names}
    groups = _groups({name: tensor.nbytes for name, tensor in stored.items()}, files) if stored else []

    def contents() -> Iterator[tuple[str, Iterable[Any]]]:
        for name, tensor in stored.items():
            yield name, _bytes_of(name, tensors.read(name), tensor)

    remaining = contents()
    for number, names in enumerate(groups, start=1):
        suffix = "" if len(groups) == 1 else f"-{number:05}-of-{len(groups):05}"
        path = folder / f"{stem}{suffix}.safetensors"
        write_stored(path, {name: stored[name] for name in names}, islice(remaining, len(names)), metadata)


def open_tensors(folder: Path, stem: str) -> TensorFiles:
    """Open the tensors that `write_tensors` has written into `folder`.

    Raises:
        CheckpointError: a file is damaged.
    """
    try:
        files = [SafetensorsFile(path) for path in sorted(folder.glob(f"{stem}*.safetensors"))]
    except ModelFileError as error:
        raise CheckpointError(str(error)) from None
    file_of = {name: file for file in files for name in file.names()}
    return TensorFiles(tuple(file_of), lambda name: file_of[name].read(name), tuple(file.metadata for file in files))


def _groups(sizes: Mapping[str, int], files: int) -> list[list[str]]:
    """Split the names in order into `files` groups of about the same size, and each group further
    if it is too large."""
    groups: list[dict[str, int]] = [{}]
    total, filled = sum(sizes.values()), 0
    for number, (name, size) in enumerate(sizes.items()):
        due = filled * files >= total * len(groups) or len(sizes) - number <= files - len(groups)
        if groups[-1] and due and len(groups) < files:
            groups.append({})
        groups[-1][name] = size
        filled += size
    return [names for group in groups for names in split_into_shards(group, MAX_FILE_BYTES)]


def _bytes_of(name: str, values: np.ndarray | None, tensor: StoredTensor) -> Iterator[memoryview]:
    """Yield one block. A generator, because it releases the values before the next tensor is read."""
    assert values is not None and values.shape == tensor.shape, (name, tensor)
    halves = values.dtype == np.float32 and tensor.dtype in ("BF16", "F16")
    yield np.ascontiguousarray(to_stored(name, values, tensor.dtype) if halves else values).reshape(-1).data

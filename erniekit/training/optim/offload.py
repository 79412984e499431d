"""AdamW whose moments are stored in 16 bits, or away from the device, between its steps (`optim: adamw_custom`).

The arithmetic is Paddle's AdamW, one tensor at a time, on temporary float32 moments: with float32 storage every update
is the same to the bit. In bfloat16 moments are rounded to nearest, ties to even, once a step. Fleet's sharded
optimizers call it for the tensors that a rank updates.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import paddle
from paddle import Tensor

from erniekit.errors import TrainingError
from erniekit.model.storage.safetensors import StoredTensor
from erniekit.training.optim.adamw import MASTER_WEIGHT, StatefulAdamW

MOMENTS = ("moment1", "moment2")
_REGION = 1 << 30  # bytes of a file that are mapped at once: every mapping uses one of the process's open files


@dataclass(frozen=True)
class MomentStorage:
    """Where moments are stored between steps, and in which dtype.

    Attributes:
        bfloat16: instead of float32.
        folder: store moments and master weights in a memory-mapped file in this folder, or on a GPU in pinned host
            memory; None: on the device.
        release: release the pages of the mapped file as soon as a tensor has been used. Otherwise they stay until
            the system needs them.
    """

    bfloat16: bool = False
    folder: Path | None = None
    release: bool = False

    def __str__(self) -> str:
        kind = "bfloat16" if self.bfloat16 else "float32"
        if self.folder is None:
            return f"moments in {kind}"
        if paddle.get_device().startswith("gpu"):
            return f"moments in {kind}, in pinned host memory"
        paging = ", each page of it in memory only while it is used" if self.release else ""
        return f"moments in {kind}, in a mapped file in {self.folder}{paging}"


class TensorStore(Protocol):
    """One tensor between steps."""

    def read(self) -> Tensor:
        """Return its values on the device, in the dtype in which they are stored."""
        ...

    def write(self, values: Tensor) -> None: ...


class StoredMomentsAdamW(StatefulAdamW):
    """An AdamW that loads the moments of a tensor, and its master weight if it is offloaded, only for the tensor's
    update.

    Raises:
        TrainingError: the folder has no room for the state.
    """

    def __init__(self, storage: MomentStorage, **settings: Any) -> None:
        super().__init__(**settings)
        self._storage, self._stores = storage, dict[str, dict[str, TensorStore]]()  # by tensor and kind
        offloaded = storage.folder is not None and not paddle.get_device().startswith("gpu")
        self._file = _MappedFile(storage) if offloaded else None

    def state_spec(self, kind: str, parameter: StoredTensor) -> StoredTensor:
        state_spec = super().state_spec(kind, parameter)
        return StoredTensor("BF16", state_spec.shape) if self._storage.bfloat16 and kind in MOMENTS else state_spec

    def read(self, name: str, kind: str) -> Tensor:
        """Return a state of a tensor; if it is stored, a copy in the dtype in which it is stored."""
        store = self._stores.get(name, {}).get(kind)
        return super().read(name, kind) if store is None else store.read()

    def write(self, name: str, kind: str, values: np.ndarray) -> None:
        store = self._stores.get(name, {}).get(kind)
        if store is None:
            super().write(name, kind, values)
        else:
            store.write(paddle.to_tensor(values))

    def _create_accumulators(self, block: Any, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            name = parameter.name
            if name not in self._stores:
                super()._create_accumulators(block, [parameter])
                kinds = self._stored_kinds(parameter)
                self._stores[name] = {kind: self._new_store(kind, self._detach(name, kind)) for kind in kinds}

    def _append_optimize_op(self, block: Any, param_and_grad: Any) -> None:
        name = param_and_grad[0].name
        for kind, store in self._stores[name].items():
            self._attach(name, kind, _to_float32(store.read()))
        super()._append_optimize_op(block, param_and_grad)
        for kind, store in self._stores[name].items():
            store.write(self._detach(name, kind))

    def _stored_kinds(self, parameter: Tensor) -> Sequence[str]:
        offloaded = self._storage.folder is not None
        return [kind for kind in self.kinds(parameter) if kind in MOMENTS or (offloaded and kind == MASTER_WEIGHT)]

    def _new_store(self, kind: str, values: Tensor) -> TensorStore:
        bfloat16 = self._storage.bfloat16 and kind in MOMENTS
        if self._file is None:
            return _MemoryStore(values, bfloat16, pinned=self._storage.folder is not None)
        return self._file.next(values, bfloat16)

    def _attach(self, name: str, kind: str, values: Tensor) -> None:
        """Give AdamW a state of a tensor; a master weight keeps its name, by which the other states are found."""
        if kind == MASTER_WEIGHT:
            values.name = self._master_weights[name].name
            self._master_weights[name] = values
        else:
            master = self._master_weights.get(name)
            self._accumulators[kind][name if master is None else master.name] = values

    def _detach(self, name: str, kind: str) -> Tensor:
        """Take a state from AdamW and leave an empty tensor in its place."""
        taken = StatefulAdamW.read(self, name, kind)
        self._attach(name, kind, paddle.empty([0]))
        return taken


def _to_float32(values: Tensor) -> Tensor:
    """Convert to the dtype in which AdamW computes."""
    return values.astype("float32") if values.dtype == paddle.bfloat16 else values


class _MemoryStore:
    def __init__(self, values: Tensor, bfloat16: bool, pinned: bool) -> None:
        self._bfloat16, self._pinned = bfloat16, pinned
        self.write(values)

    def read(self) -> Tensor:
        return self._values.cuda() if self._pinned else self._values

    def write(self, values: Tensor) -> None:
        values = values.astype("bfloat16") if self._bfloat16 else values
        self._values: Tensor = values.pin_memory() if self._pinned else values


class _MappedFile:
    """An unnamed file that disappears with the process and contains consecutive tensors."""

    def __init__(self, storage: MomentStorage) -> None:
        assert storage.folder is not None
        self._folder, self._release = storage.folder, storage.release
        self._start, self._used = 0, 0  # the current region: its start in the file, and the number of bytes used
        with self._disk_errors():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file: Any = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (open as long as this is)
            self._region = self._map(_REGION)

    def next(self, values: Tensor, bfloat16: bool) -> _MappedStore:
        """Allocate room for a tensor and write its values. It starts at a page, so that its pages can be released."""
        dtype = np.dtype(np.uint16) if bfloat16 else values.numpy().dtype
        length = -(-max(1, values.size * dtype.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._disk_errors():
            if self._used + length > len(self._region):
                self._start, self._used = self._start + len(self._region), 0
                self._region = self._map(max(length, _REGION))
            # Reserve the disk space now; otherwise writing crashes when the disk is full.
            os.posix_fallocate(self._file.fileno(), self._start + self._used, length)
        mapped = _MappedStore(self._region, range(self._used, self._used + length), dtype, values.shape, self._release)
        self._used += length
        mapped.write(values)
        return mapped

    def _map(self, length: int) -> mmap.mmap:
        os.ftruncate(self._file.fileno(), self._start + length)  # takes no disk space yet
        return mmap.mmap(self._file.fileno(), length, offset=self._start)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            after = (self._start + self._used) / 2**20
            raise TrainingError(
                f"{self._folder}: no room for AdamW's moments after {after:,.0f} MiB ({error.strerror}).\n"
                "  Free some space, choose another output_dir, or write offload_optim: false and "
                "tensorwise_offload_optimizer: false."
            ) from None


class _MappedStore:
    """A tensor in a part of a mapping.

    Args:
        pages: byte range of complete pages.
    """

    def __init__(self, region: mmap.mmap, pages: range, dtype: np.dtype, shape: Sequence[int], release: bool) -> None:
        self._region, self._pages, self._release = region, pages, release
        self._values = np.frombuffer(region, dtype, math.prod(shape), pages.start).reshape(shape)

    def read(self) -> Tensor:
        values = paddle.to_tensor(self._values)  # uint16 becomes bfloat16
        self._release_pages()
        return values

    def write(self, values: Tensor) -> None:
        self._values[...] = (values.astype("bfloat16") if self._values.dtype == np.uint16 else values).numpy()
        self._release_pages()

    def _release_pages(self) -> None:
        if self._release:
            self._region.madvise(mmap.MADV_DONTNEED, self._pages.start, len(self._pages))

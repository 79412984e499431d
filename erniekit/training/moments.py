"""AdamW whose moments are kept in fewer bits, or away from the device, between its steps (`optim: adamw_custom`).

The arithmetic is Paddle's AdamW, one parameter after another, on float32 moments that exist for that moment only: with
float32 storage every update is the same to the bit. In bfloat16 moments are rounded to nearest, ties to even, once a
step.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import paddle
from paddle import Tensor
from paddle.optimizer import AdamW

from erniekit.errors import TrainingError
from erniekit.model.storage.safetensors_file import StoredTensor
from erniekit.model.whole import Held, stored_as
from erniekit.training.optimizer import OwnState, create_state, optimizer_state, trainable_parameters

MOMENTS = ("moment1", "moment2")


@dataclass(frozen=True)
class MomentStorage:
    """Where moments are between steps, and in how many bits.

    Attributes:
        bfloat16: instead of float32.
        folder: they lie in a file that is mapped into memory, in this folder, or on a GPU in pinned host memory; None:
            on the device.
        release: give the pages of the mapped file back as soon as a tensor has been used. Otherwise they stay until the
            system wants them for something else.
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
        at_once = ", each page of it in memory only while it is used" if self.release else ""
        return f"moments in {kind}, in a mapped file in {self.folder}{at_once}"


class Store(Protocol):
    """One tensor between steps."""

    def read(self) -> Tensor:
        """Its values on the device, in the type in which they are stored."""
        ...

    def stored(self) -> StoredTensor:
        """Type and shape of what `read` gives."""
        ...

    def write(self, values: Tensor) -> None: ...


class StoredMomentsAdamW:
    """An AdamW in whose place this stands, with its moments in stores of their own.

    Args:
        adamw: without its state (`stateless_optimizer`).
        parameters: by name; the trainable ones are those of `adamw`.

    Raises:
        TrainingError: the folder has no room for the moments.
    """

    def __init__(self, adamw: AdamW, parameters: Mapping[str, Tensor], storage: MomentStorage) -> None:
        self._adamw, self._parameters = adamw, trainable_parameters(parameters)
        self._stores: dict[tuple[str, str], Store] = {}
        sizes = [parameter.size for parameter in self._parameters.values() for _ in MOMENTS]
        on_gpu = paddle.get_device().startswith("gpu")
        place = _File(storage, sizes) if storage.folder is not None and not on_gpu else None
        for name, parameter in self._parameters.items():
            create_state(adamw, [parameter])
            for kind in MOMENTS:
                zeros = self._take(kind, parameter)
                if place is not None:
                    self._stores[name, kind] = place.next(zeros.shape)
                else:
                    self._stores[name, kind] = _InMemory(zeros, storage.bfloat16, pinned=storage.folder is not None)

    def set_lr(self, value: float) -> None:
        self._adamw.set_lr(value)

    def clear_grad(self, set_to_zero: bool = True) -> None:
        self._adamw.clear_grad(set_to_zero)

    @paddle.no_grad()
    def step(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            for kind in MOMENTS:
                self._adamw._accumulators[kind][self._key(parameter)] = _wide(self._stores[name, kind].read())
            self._adamw._apply_optimize(loss=None, startup_program=None, params_grads=[(parameter, parameter.grad)])
            for kind in MOMENTS:
                self._stores[name, kind].write(self._take(kind, parameter))

    def state_tensors(self) -> dict[str, StoredTensor]:
        """Type and shape of everything that it remembers, by `<parameter>/<kind>`, as AdamW's."""
        found = {name: stored_as(tensor) for name, tensor in optimizer_state(self._adamw, self._parameters).items()}
        return found | {f"{name}/{kind}": store.stored() for (name, kind), store in self._stores.items()}

    def read_state(self, name: str) -> Tensor:
        """One of `state_tensors`."""
        parameter, _, kind = name.rpartition("/")
        if kind in MOMENTS:
            return self._stores[parameter, kind].read()
        return optimizer_state(self._adamw, {parameter: self._parameters[parameter]})[name]

    def write_state(self, name: str, value: np.ndarray) -> None:
        """Set one of `state_tensors`."""
        parameter, _, kind = name.rpartition("/")
        if kind in MOMENTS:
            self._stores[parameter, kind].write(paddle.to_tensor(value))
        else:
            self.read_state(name).set_value(value)

    def own_state(self) -> OwnState:
        """All of it, which lies on this rank."""
        return OwnState(Held(self.state_tensors(), self.read_state), self.write_state)

    def _key(self, parameter: Tensor) -> str:
        """The name under which AdamW keeps what it remembers of a parameter: its own, or that of its float32 copy."""
        master = self._adamw._master_weights.get(parameter.name)
        return str(parameter.name if master is None else master.name)

    def _take(self, kind: str, parameter: Tensor) -> Tensor:
        """A moment that AdamW has now; it keeps an empty one in its place."""
        held, key = self._adamw._accumulators[kind], self._key(parameter)
        taken, held[key] = held[key], paddle.empty([0])
        return taken


def _wide(values: Tensor) -> Tensor:
    """In the type with which AdamW computes."""
    return values.astype("float32") if values.dtype == paddle.bfloat16 else values


class _InMemory:
    def __init__(self, values: Tensor, bfloat16: bool, pinned: bool) -> None:
        self._bfloat16, self._pinned = bfloat16, pinned
        self.write(values)

    def read(self) -> Tensor:
        return self._values.cuda() if self._pinned else self._values

    def stored(self) -> StoredTensor:
        return stored_as(self._values)

    def write(self, values: Tensor) -> None:
        values = values.astype("bfloat16") if self._bfloat16 else values
        self._values: Tensor = values.pin_memory() if self._pinned else values


class _File:
    """A file without a name, which ends with the process, cut into tensors one after another."""

    def __init__(self, storage: MomentStorage, sizes: list[int]) -> None:
        self._dtype, self._release = np.dtype(np.uint16 if storage.bfloat16 else np.float32), storage.release
        length = sum(map(self._padded, sizes))
        assert storage.folder is not None
        try:
            storage.folder.mkdir(parents=True, exist_ok=True)
            self._file: Any = tempfile.TemporaryFile(dir=storage.folder)  # noqa: SIM115 (open as long as this is)
            os.posix_fallocate(self._file.fileno(), 0, max(1, length))  # now, rather than a crash when it is written
        except OSError as error:
            raise TrainingError(
                f"{storage.folder}: no file of {length / 2**20:,.0f} MiB for AdamW's moments ({error.strerror}).\n"
                "  Free some space, choose another output_dir, or write offload_optim: false and "
                "tensorwise_offload_optimizer: false."
            ) from None
        self._end = 0

    def next(self, shape: list[int]) -> _Mapped:
        size = int(np.prod(shape))
        mapped = np.memmap(self._file, self._dtype, "r+", self._end, tuple(shape))
        self._end += self._padded(size)
        return _Mapped(mapped, self._release)

    def _padded(self, size: int) -> int:
        """Bytes of a tensor up to the next page, so that each can give back its own."""
        return -(-size * self._dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE


class _Mapped:
    def __init__(self, values: np.memmap, release: bool) -> None:
        self._values, self._release = values, release

    def read(self) -> Tensor:
        values = paddle.to_tensor(np.asarray(self._values))  # uint16 becomes bfloat16
        self._done()
        return values

    def stored(self) -> StoredTensor:
        return StoredTensor("BF16" if self._values.dtype == np.uint16 else "F32", self._values.shape)

    def write(self, values: Tensor) -> None:
        self._values[...] = (values.astype("bfloat16") if self._values.dtype == np.uint16 else values).numpy()
        self._done()

    def _done(self) -> None:
        if self._release:
            self._values._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]

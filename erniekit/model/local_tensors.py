"""Local and full tensors: one interface for files to read tensors that one process holds or that ranks shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import paddle
from paddle import Tensor

from erniekit.model.storage.safetensors import StoredTensor

_FORMAT = {  # Paddle's dtypes and their names in files
    paddle.float64: "F64",
    paddle.float32: "F32",
    paddle.float16: "F16",
    paddle.bfloat16: "BF16",
    paddle.int64: "I64",
    paddle.int32: "I32",
    paddle.int16: "I16",
    paddle.int8: "I8",
    paddle.uint8: "U8",
    paddle.bool: "BOOL",
}
_PADDLE = {name: dtype for dtype, name in _FORMAT.items()}


class LocalTensors(NamedTuple):
    """The tensors of one rank, perhaps shards.

    Attributes:
        tensors: by name, dtype and shape of the tensor that `read` returns.
        read: returns one of them. Ranks that have the same name call it together.
    """

    tensors: Mapping[str, StoredTensor]
    read: Callable[[str], Tensor]


def local_tensors(tensors: Mapping[str, Tensor]) -> LocalTensors:
    """Wrap the tensors of this process."""
    return LocalTensors({name: tensor_spec(tensor) for name, tensor in tensors.items()}, tensors.__getitem__)


class FullTensors(Protocol):
    """The full tensors of all ranks by name; every rank reads all of them, in the order of `names`.

    Attributes:
        names: the same on every rank.
    """

    @property
    def names(self) -> Sequence[str]: ...

    def stored(self, name: str) -> StoredTensor:
        """Return dtype and shape of a full tensor."""
        ...

    def read(self, name: str) -> np.ndarray | None:
        """Return the full tensor, bfloat16 as float32, on the rank that writes; None on the others, which send their
        shards."""
        ...


class SingleProcessTensors:
    """`FullTensors` of a single process, which has all tensors."""

    def __init__(self, own: LocalTensors) -> None:
        self._own = own
        self.names = tuple(own.tensors)

    def stored(self, name: str) -> StoredTensor:
        return self._own.tensors[name]

    def read(self, name: str) -> np.ndarray:
        return to_numpy(self._own.read(name))


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Convert to NumPy; bfloat16, which NumPy lacks, becomes float32 without loss."""
    return (tensor.astype("float32") if tensor.dtype == paddle.bfloat16 else tensor).numpy()


def tensor_spec(tensor: Tensor) -> StoredTensor:
    """Return the dtype and shape with which a file stores a tensor without loss."""
    return StoredTensor(_FORMAT[tensor.dtype], tuple(tensor.shape))


def paddle_dtype(name: str) -> paddle.dtype:
    """Return Paddle's dtype for a file's dtype name, such as "BF16"."""
    return _PADDLE[name]

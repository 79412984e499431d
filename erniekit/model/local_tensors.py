"""Tensors as files have them: whole, one after another, wherever their values are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import paddle
from paddle import Tensor

from erniekit.model.storage.safetensors import StoredTensor

_FORMAT = {  # Paddle's types and the names that files have for them
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
    """What one rank holds of some tensors, perhaps slices of them.

    Attributes:
        tensors: by name, type and shape of what `read` gives.
        read: one of them. Ranks that hold the same name call it together.
    """

    tensors: Mapping[str, StoredTensor]
    read: Callable[[str], Tensor]


def local_tensors(tensors: Mapping[str, Tensor]) -> LocalTensors:
    """Tensors of this process."""
    return LocalTensors({name: tensor_spec(tensor) for name, tensor in tensors.items()}, tensors.__getitem__)


class FullTensors(Protocol):
    """The tensors of all ranks under their names; every rank reads all of them, in the order of `names`.

    Attributes:
        names: the same on every rank.
    """

    @property
    def names(self) -> Sequence[str]: ...

    def stored(self, name: str) -> StoredTensor:
        """Type and shape of a whole tensor."""
        ...

    def read(self, name: str) -> np.ndarray | None:
        """The whole tensor, bfloat16 as float32, on the rank that writes; None on the others, which give what they hold
        of it."""
        ...


class SingleProcessTensors:
    """`FullTensors` of one process, which holds all."""

    def __init__(self, own: LocalTensors) -> None:
        self._own = own
        self.names = tuple(own.tensors)

    def stored(self, name: str) -> StoredTensor:
        return self._own.tensors[name]

    def read(self, name: str) -> np.ndarray:
        return to_numpy(self._own.read(name))


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The values as NumPy holds them: bfloat16, which it does not know, as float32, which loses nothing."""
    return (tensor.astype("float32") if tensor.dtype == paddle.bfloat16 else tensor).numpy()


def tensor_spec(tensor: Tensor) -> StoredTensor:
    """How a file has a tensor's values without loss."""
    return StoredTensor(_FORMAT[tensor.dtype], tuple(tensor.shape))


def paddle_dtype(name: str) -> paddle.dtype:
    """Paddle's type for a file's name of a type, such as "BF16"."""
    return _PADDLE[name]

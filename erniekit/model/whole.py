"""Tensors as files have them: whole, one after another, wherever their values are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import paddle
from paddle import Tensor


class Held(NamedTuple):
    """What one rank holds of some tensors, perhaps slices of them.

    Attributes:
        shapes: by name, of what `read` gives.
        read: one of them. Ranks that hold the same name call it together.
    """

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]


def held(tensors: Mapping[str, Tensor]) -> Held:
    """Tensors of this process."""
    return Held({name: tuple(tensor.shape) for name, tensor in tensors.items()}, tensors.__getitem__)


class WholeTensors(Protocol):
    """The tensors of all ranks under their names; every rank reads all of them, in the order of `names`.

    Attributes:
        names: the same on every rank.
    """

    @property
    def names(self) -> Sequence[str]: ...

    def nbytes(self, name: str) -> int:
        """The size of a whole tensor."""
        ...

    def read(self, name: str) -> np.ndarray | None:
        """The whole tensor on the rank that writes; None on the others, which give what they hold of it."""
        ...


class OwnTensors:
    """`WholeTensors` of one process, which holds all."""

    def __init__(self, own: Held) -> None:
        self._own = own
        self.names = tuple(own.shapes)

    def nbytes(self, name: str) -> int:
        tensor = self._own.read(name)
        return tensor.size * tensor.element_size()

    def read(self, name: str) -> np.ndarray:
        return values_of(self._own.read(name))


def values_of(tensor: Tensor) -> np.ndarray:
    """The values as NumPy holds them: bfloat16, which it does not know, as float32, which loses nothing."""
    return (tensor.astype("float32") if tensor.dtype == paddle.bfloat16 else tensor).numpy()

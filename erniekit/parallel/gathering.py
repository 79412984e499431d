"""Tensors that the ranks of a layout hold in parts, brought to the first rank whole, one after another."""

from __future__ import annotations

import math

import numpy as np
import paddle
import paddle.distributed as dist

from erniekit.model.placement import placement
from erniekit.model.whole import Held
from erniekit.parallel.mesh import Mesh

WRITER = 0  # the rank that gets them


def axis_of(name: str) -> int | None:
    """The axis along which the ranks of a tensor-parallel group divide a weight, or a state `<weight>/<kind>` of it."""
    weight, _, state = name.partition("/")
    return None if state.endswith("pow_acc") else placement(weight).axis


class Gathered:
    """`WholeTensors` of a layout. Made and read by every rank together.

    A tensor is cut as the weight of its name is (`placement`; what follows a "/" names a state of the weight). Of ranks
    that hold the same values the first one gives them.
    """

    def __init__(self, mesh: Mesh, own: Held) -> None:
        self._mesh, self._own = mesh, own
        everyone = mesh.exchange({name: list(shape) for name, shape in own.shapes.items()})
        self._holders: dict[str, list[int]] = {}
        self._shapes: dict[str, list[int]] = {}
        for rank, shapes in enumerate(everyone):
            for name, shape in shapes.items():
                self._holders.setdefault(name, []).append(rank)
                self._shapes[name] = shape
        self.names = tuple(self._holders)
        self._dtype = paddle.get_default_dtype()

    def nbytes(self, name: str) -> int:
        slices = len(self._givers(name))
        return math.prod(self._shapes[name]) * slices * np.dtype(self._dtype).itemsize

    def read(self, name: str) -> np.ndarray | None:
        """The whole tensor on the first rank, None on the others."""
        givers, rank = self._givers(name), self._mesh.rank
        own = self._own.read(name) if name in self._own.shapes else None
        if own is not None and own.element_size() == 2:
            own = own.astype(self._dtype)  # 16-bit weights
        if rank != WRITER:
            if rank in givers:
                assert own is not None
                dist.send(own.contiguous(), dst=WRITER, group=self._everyone())
            return None
        parts = []
        for giver in givers:
            if giver == rank:
                assert own is not None
                parts.append(own.numpy())
            else:
                part = paddle.empty(self._shapes[name], self._dtype)
                dist.recv(part, src=giver, group=self._everyone())
                parts.append(part.numpy())
        axis = self._axis(name)
        return parts[0] if axis is None else np.concatenate(parts, axis)

    def _givers(self, name: str) -> list[int]:
        """The ranks whose values make up the tensor, in the order of its slices."""
        holders = self._holders[name]
        if self._axis(name) is None:
            return holders[:1]
        of_slice = self._mesh.topology.coordinates
        return [next(rank for rank in holders if of_slice(rank).tensor == part) for part in range(self._slices)]

    def _axis(self, name: str) -> int | None:
        return axis_of(name) if self._slices > 1 else None

    @property
    def _slices(self) -> int:
        return self._mesh.topology.tensor

    def _everyone(self) -> object:
        return self._mesh.group("data", "pipeline", "sharding", "tensor")

"""Tensors that the ranks of a layout hold in parts, brought to the first rank whole, one after another."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed as dist

from erniekit.model.placement import placement
from erniekit.model.storage.safetensors_file import StoredTensor
from erniekit.model.whole import Held, paddle_type, stored_as, values_of
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
        self._holders: dict[str, list[int]] = {}
        self._parts: dict[str, StoredTensor] = {}  # what each holder has of it
        for rank, parts in enumerate(mesh.exchange(dict(own.tensors))):
            for name, (dtype, shape) in parts.items():
                self._holders.setdefault(name, []).append(rank)
                self._parts[name] = StoredTensor(dtype, tuple(shape))
        self.names = tuple(self._holders)

    def stored(self, name: str) -> StoredTensor:
        dtype, shape = self._parts[name]
        axis, slices = self._axis(name), len(self._givers(name))
        return StoredTensor(dtype, tuple(size * slices if axis == at else size for at, size in enumerate(shape)))

    def read(self, name: str) -> np.ndarray | None:
        """The whole tensor, bfloat16 as float32, on the first rank; None on the others. It travels in its own type."""
        givers, rank, part = self._givers(name), self._mesh.rank, self._parts[name]
        self._wait_for_writer()
        own = self._own.read(name) if name in self._own.tensors else None
        assert own is None or stored_as(own) == part, (name, own.dtype, own.shape, part)
        if rank != WRITER:
            if rank in givers:
                assert own is not None
                dist.send(own.contiguous(), dst=WRITER, group=self._everyone())
            return None
        axis, whole = self._axis(name), None
        for number, giver in enumerate(givers):
            given = own
            if giver != rank:
                given = paddle.empty(part.shape, paddle_type(part.dtype))
                dist.recv(given, src=giver, group=self._everyone())
            assert given is not None
            values = values_of(given)
            if axis is None:
                return values
            if whole is None:
                whole = np.empty(self.stored(name).shape, values.dtype)
            width = part.shape[axis]
            whole[(slice(None),) * axis + (slice(number * width, (number + 1) * width),)] = values
        return whole

    def _wait_for_writer(self) -> None:
        """Until it has done with the tensor before this one: what is sent to it earlier would pile up in its memory."""
        dist.broadcast(paddle.zeros([1], "int32"), src=WRITER, group=self._everyone())

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

"""Tensors that the ranks of a layout hold in parts, brought to the first rank whole, one after another."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed as dist

from erniekit.model.placement import placement
from erniekit.model.storage.safetensors_file import StoredTensor
from erniekit.model.whole import LocalTensors, paddle_dtype, tensor_spec, to_numpy
from erniekit.parallel.mesh import Mesh

WRITER_RANK = 0  # the rank that gets them


def tp_shard_axis(name: str) -> int | None:
    """The axis along which the ranks of a tensor-parallel group divide a weight, or a state `<weight>/<kind>` of it."""
    weight, _, state = name.partition("/")
    return None if state.endswith("pow_acc") else placement(weight).axis


class GatheredTensors:
    """`FullTensors` of a layout. Made and read by every rank together.

    A tensor is cut as the weight of its name is (`placement`; what follows a "/" names a state of the weight). Of ranks
    that hold the same values the first one gives them.
    """

    def __init__(self, mesh: Mesh, local: LocalTensors) -> None:
        self._mesh, self._local = mesh, local
        self._holders: dict[str, list[int]] = {}
        self._shards: dict[str, StoredTensor] = {}  # what each holder has of it
        for rank, shards in enumerate(mesh.all_gather_object(dict(local.tensors))):
            for name, (dtype, shape) in shards.items():
                self._holders.setdefault(name, []).append(rank)
                self._shards[name] = StoredTensor(dtype, tuple(shape))
        self.names = tuple(self._holders)

    def stored(self, name: str) -> StoredTensor:
        dtype, shape = self._shards[name]
        axis, num_shards = self._axis(name), len(self._source_ranks(name))
        return StoredTensor(dtype, tuple(size * num_shards if axis == at else size for at, size in enumerate(shape)))

    def read(self, name: str) -> np.ndarray | None:
        """The whole tensor, bfloat16 as float32, on the first rank; None on the others. It travels in its own type."""
        sources, rank, shard = self._source_ranks(name), self._mesh.rank, self._shards[name]
        self._wait_for_writer()
        local = self._local.read(name) if name in self._local.tensors else None
        assert local is None or tensor_spec(local) == shard, (name, local.dtype, local.shape, shard)
        if rank != WRITER_RANK:
            if rank in sources:
                assert local is not None
                dist.send(local.contiguous(), dst=WRITER_RANK, group=self._world_group())
            return None
        axis, full = self._axis(name), None
        for number, source in enumerate(sources):
            received = local
            if source != rank:
                received = paddle.empty(shard.shape, paddle_dtype(shard.dtype))
                dist.recv(received, src=source, group=self._world_group())
            assert received is not None
            values = to_numpy(received)
            if axis is None:
                return values
            if full is None:
                full = np.empty(self.stored(name).shape, values.dtype)
            width = shard.shape[axis]
            full[(slice(None),) * axis + (slice(number * width, (number + 1) * width),)] = values
        return full

    def _wait_for_writer(self) -> None:
        """Until it has done with the tensor before this one: what is sent to it earlier would pile up in its memory."""
        dist.broadcast(paddle.zeros([1], "int32"), src=WRITER_RANK, group=self._world_group())

    def _source_ranks(self, name: str) -> list[int]:
        """The ranks whose values make up the tensor, in the order of its slices."""
        holders = self._holders[name]
        if self._axis(name) is None:
            return holders[:1]
        coords_of = self._mesh.topology.coordinates
        return [next(rank for rank in holders if coords_of(rank).tensor == shard) for shard in range(self._tp_degree)]

    def _axis(self, name: str) -> int | None:
        return tp_shard_axis(name) if self._tp_degree > 1 else None

    @property
    def _tp_degree(self) -> int:
        return self._mesh.topology.tensor

    def _world_group(self) -> object:
        return self._mesh.group("data", "pipeline", "sharding", "tensor")

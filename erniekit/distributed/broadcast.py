"""Gather sharded tensors on the first rank, one at a time, and broadcast arrays from the first rank of a group."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from erniekit.distributed.mesh import Mesh
from erniekit.model.architectures.architecture import Architecture
from erniekit.model.local_tensors import LocalTensors, paddle_dtype, tensor_spec, to_numpy
from erniekit.model.storage.safetensors import StoredTensor
from erniekit.training.objectives.policy import ROLLOUT
from erniekit.training.objectives.reference import REFERENCE_TABLES

WRITER_RANK = 0  # the rank that gathers the tensors


def tp_shard_axis(architecture: Architecture, name: str) -> int | None:
    """Return the axis along which tensor parallelism shards a weight, or an optimizer state `<weight>/<kind>` of it.

    The tables of precomputed references, which checkpoints also hold, are no weights and are never sharded.
    """
    weight, _, state = name.partition("/")
    if name in REFERENCE_TABLES or name.startswith(ROLLOUT):
        return None
    return None if state.endswith("pow_acc") else architecture.placement(weight).axis


class GatheredTensors:
    """`FullTensors` of a layout. All ranks create and read it together.

    A tensor is cut as the architecture says of the weight of its name; what follows a "/" names a state of the weight.
    Of ranks that hold the same values the first one gives them.
    """

    def __init__(self, mesh: Mesh, local: LocalTensors, architecture: Architecture) -> None:
        self._mesh, self._local, self._architecture = mesh, local, architecture
        self._holders: dict[str, list[int]] = {}
        self._shards: dict[str, StoredTensor] = {}  # each rank's shard
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
        """Return the full tensor, bfloat16 as float32, on the first rank; None on the others. It is sent in its own
        dtype."""
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
        """Wait until the writer has finished the previous tensor, because tensors sent earlier would pile up in its
        memory."""
        dist.broadcast(paddle.zeros([1], "int32"), src=WRITER_RANK, group=self._world_group())

    def _source_ranks(self, name: str) -> list[int]:
        """Return the ranks whose shards make up the tensor, in the order of the shards."""
        holders = self._holders[name]
        if self._axis(name) is None:
            return holders[:1]
        coords_of = self._mesh.topology.coordinates
        return [next(rank for rank in holders if coords_of(rank).tensor == shard) for shard in range(self._tp_degree)]

    def _axis(self, name: str) -> int | None:
        return tp_shard_axis(self._architecture, name) if self._tp_degree > 1 else None

    @property
    def _tp_degree(self) -> int:
        return self._mesh.topology.tensor

    def _world_group(self) -> object:
        return self._mesh.group("data", "pipeline", "sharding", "tensor")


# Broadcasting arrays from the first rank of a group: two collectives, whatever the number of arrays.

ALIGNMENT = 8  # bytes; received arrays begin at a multiple of it


def broadcast_arrays(metadata: Any, arrays: Sequence[np.ndarray], group: Any) -> tuple[Any, list[np.ndarray]]:
    """Return on every rank of `group` the values given by its first rank; those given by the others are ignored.

    Args:
        metadata: JSON.
        group: paddle's; None: this rank is alone.
    """
    if group is None:
        return metadata, list(arrays)
    is_source = group.rank == 0
    data = _to_bytes(metadata, arrays) if is_source else b""
    size = paddle.to_tensor([len(data)])
    dist.broadcast(size, src=group.ranks[0], group=group)
    buffer = paddle.to_tensor(np.frombuffer(data, np.uint8)) if is_source else paddle.empty([int(size)], "uint8")
    dist.broadcast(buffer, src=group.ranks[0], group=group)
    return (metadata, list(arrays)) if is_source else _from_bytes(buffer.numpy())


def _to_bytes(metadata: Any, arrays: Sequence[np.ndarray]) -> bytes:
    header = json.dumps([metadata, [[array.dtype.str, array.shape] for array in arrays]]).encode()
    blocks = [len(header).to_bytes(ALIGNMENT, "little"), header, *(array.tobytes() for array in arrays)]
    return b"".join(block + b"\0" * (-len(block) % ALIGNMENT) for block in blocks)


def _from_bytes(data: np.ndarray) -> tuple[Any, list[np.ndarray]]:
    start = ALIGNMENT

    def take(size: int) -> np.ndarray:
        nonlocal start
        first = start
        start += size + -size % ALIGNMENT
        return data[first : first + size]

    metadata, array_specs = json.loads(take(int.from_bytes(data[:ALIGNMENT].tobytes(), "little")).tobytes())
    arrays = []
    for dtype, shape in array_specs:
        kind = np.dtype(dtype)
        arrays.append(take(kind.itemsize * int(np.prod(shape))).view(kind).reshape(shape))
    return metadata, arrays

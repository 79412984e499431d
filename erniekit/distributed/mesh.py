"""This rank's position in a layout, and the process groups through which it communicates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from erniekit.distributed.topology import AXES, Axis, Coordinates, Topology
from erniekit.model.tensor_parallel import NO_TENSOR_PARALLEL, TensorParallel


@dataclass(frozen=True)
class Mesh:
    """One rank of a layout.

    Attributes:
        groups: paddle's groups by the axes in which their ranks differ; axes of degree 1 are left out.
    """

    topology: Topology = field(default_factory=Topology)
    rank: int = 0
    groups: Mapping[tuple[Axis, ...], Any] = field(default_factory=dict)

    @property
    def coords(self) -> Coordinates:
        """This rank's index on each axis."""
        return self.topology.coordinates(self.rank)

    @property
    def dp_rank(self) -> int:
        """This rank's index among the data-parallel ranks."""
        return self.topology.dp_rank_of(self.rank)

    @property
    def tp(self) -> TensorParallel:
        """This rank's tensor parallelism."""
        group = self.group("tensor")
        if group is None:
            return NO_TENSOR_PARALLEL
        return TensorParallel(self.coords.tensor, self.topology.tensor, group, self.topology.sequence_parallel)

    def group(self, *axes: Axis) -> Any:
        """Return paddle's group of the ranks that differ from this one in these axes only; None if
        there is no other."""
        active_axes = tuple(axis for axis in AXES if axis in axes and self.topology.degree(axis) > 1)
        return self.groups[active_axes] if active_axes else None

    def is_first(self, *axes: Axis) -> bool:
        """Return whether this rank has index 0 on all of these axes (default: all axes)."""
        return all(getattr(self.coords, axis) == 0 for axis in axes or AXES)

    def sum(self, values: np.ndarray, *axes: Axis) -> np.ndarray:
        """Return the float64 sum of values over the ranks that differ in these axes, on each of them."""
        group = self.group(*axes)
        if group is None:
            return values
        total = paddle.to_tensor(np.asarray(values, np.float64))
        dist.all_reduce(total, group=group)
        return total.numpy()

    def maximum(self, values: np.ndarray, *axes: Axis) -> np.ndarray:
        """Return the elementwise maximum over the ranks that differ in these axes (default: all
        axes), on each of them."""
        group = self.group(*(axes or AXES))
        if group is None:
            return values
        largest = paddle.to_tensor(values)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return largest.numpy()

    def all_gather_object(self, value: Any, *axes: Axis) -> list[Any]:
        """Return the JSON values of the ranks that differ in these axes only (default: all axes), in the order of the
        ranks."""
        group = self.group(*(axes or AXES))
        if group is None:
            return [value]
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths: list[paddle.Tensor] = []
        dist.all_gather(lengths, paddle.to_tensor([text.size]), group=group)
        sizes = [int(length) for length in lengths]
        padded = np.zeros(max(sizes), np.uint8)
        padded[: text.size] = text
        texts: list[paddle.Tensor] = []
        dist.all_gather(texts, paddle.to_tensor(padded), group=group)
        return [json.loads(part.numpy()[:size].tobytes()) for part, size in zip(texts, sizes, strict=True)]


SINGLE_PROCESS_MESH = Mesh()

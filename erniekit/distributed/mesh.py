"""This process among the ranks of a layout: where it is, and the groups through which it exchanges tensors."""

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
        groups: paddle's group of the ranks that differ in some axes only, by these axes; axes of degree 1 left out.
    """

    topology: Topology = field(default_factory=Topology)
    rank: int = 0
    groups: Mapping[tuple[Axis, ...], Any] = field(default_factory=dict)

    @property
    def coords(self) -> Coordinates:
        """This rank's number on each axis."""
        return self.topology.coordinates(self.rank)

    @property
    def dp_rank(self) -> int:
        """Which part of every global batch this rank works on."""
        return self.topology.dp_rank_of(self.rank)

    @property
    def tp(self) -> TensorParallel:
        """This rank's share of every large matrix."""
        group = self.group("tensor")
        if group is None:
            return NO_TENSOR_PARALLEL
        return TensorParallel(self.coords.tensor, self.topology.tensor, group, self.topology.sequence_parallel)

    def group(self, *axes: Axis) -> Any:
        """Paddle's group of the ranks that differ from this one in these axes only; None if that is this one alone."""
        active_axes = tuple(axis for axis in AXES if axis in axes and self.topology.degree(axis) > 1)
        return self.groups[active_axes] if active_axes else None

    def is_first(self, *axes: Axis) -> bool:
        """Whether this rank is number 0 on all of these axes (all axes where none is given)."""
        return all(getattr(self.coords, axis) == 0 for axis in axes or AXES)

    def sum(self, values: np.ndarray, *axes: Axis) -> np.ndarray:
        """The float64 sum of figures over the ranks that differ in these axes; the same on each of them."""
        group = self.group(*axes)
        if group is None:
            return values
        total = paddle.to_tensor(np.asarray(values, np.float64))
        dist.all_reduce(total, group=group)
        return total.numpy()

    def maximum(self, values: np.ndarray, *axes: Axis) -> np.ndarray:
        """The largest of each figure over the ranks that differ in these axes (all axes where none is given); the same
        on each of them."""
        group = self.group(*(axes or AXES))
        if group is None:
            return values
        largest = paddle.to_tensor(values)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return largest.numpy()

    def all_gather_object(self, value: Any, *axes: Axis) -> list[Any]:
        """What every rank has given that differs from this one in these axes only (all axes where none is given), in
        the order of the ranks. Values are JSON."""
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

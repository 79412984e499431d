"""How the ranks of a layout come to their data: each reads its part, or one of those that work on the same part does.

Ranks of one pipeline and tensor group work on the same micro-batches. With `distributed_dataloader` the first of them
alone opens the data files; the others are handed what a dataset knows of itself, and every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable

from erniekit.data.batches import Batch
from erniekit.data.dataset import Dataset
from erniekit.data.plan import local_batches
from erniekit.data.transfer import (
    ArrayMessage,
    deserialize_batches,
    deserialize_index,
    serialize_batches,
    serialize_index,
)
from erniekit.parallel.handing import broadcast_arrays
from erniekit.parallel.mesh import MODEL_AXES, Mesh
from erniekit.parallel.topology import Topology
from erniekit.parameters import Config
from erniekit.runners.data_wiring import DataParallelRank


def reads_data(config: Config, topology: Topology, rank: int) -> bool:
    """Whether this rank opens data files."""
    coords = topology.coordinates(rank)
    return not config.acceleration.distributed_dataloader or coords.pipeline == coords.tensor == 0


def dp_rank_of(config: Config, mesh: Mesh) -> DataParallelRank:
    """This rank's part of every global batch, and how it comes to it."""
    group = mesh.group(*MODEL_AXES) if config.acceleration.distributed_dataloader else None

    def broadcast_batches(read: Callable[[], list[Batch]]) -> list[Batch]:
        message = serialize_batches(read()) if mesh.is_first(*MODEL_AXES) else ArrayMessage([], [])
        return deserialize_batches(ArrayMessage(*broadcast_arrays(*message, group)))

    slices = mesh.topology.tensor if mesh.topology.sequence_parallel else 1  # of the tokens of a micro-batch
    return DataParallelRank(
        mesh.dp_rank, mesh.topology.dp_world_size, slices, local_batches if group is None else broadcast_batches
    )


def broadcast_dataset_index(config: Config, mesh: Mesh, dataset: Dataset | None) -> Dataset:
    """The dataset that this rank has opened; where it has not, what the rank that reads for it says of its own."""
    group = mesh.group(*MODEL_AXES) if config.acceleration.distributed_dataloader else None
    if group is None:
        assert dataset is not None
        return dataset
    message = ArrayMessage(
        *broadcast_arrays(*(serialize_index(dataset) if dataset is not None else ArrayMessage([], [])), group)
    )
    return dataset if dataset is not None else deserialize_index(message)

"""How the ranks of a layout come to their data: each reads its part, or one of those that work on the same part does.

Ranks of one pipeline and tensor group work on the same micro-batches. With `distributed_dataloader` the first of them
alone opens the data files; the others are handed what a dataset knows of itself, and every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable

from erniekit.data.batches import Batch
from erniekit.data.dataset import Dataset
from erniekit.data.plan import read_here
from erniekit.data.transfer import Message, pack_batches, pack_index, unpack_batches, unpack_index
from erniekit.parallel.handing import hand_over
from erniekit.parallel.mesh import MODEL_AXES, Mesh
from erniekit.parallel.topology import Topology
from erniekit.parameters import Config
from erniekit.runners.data_wiring import Reader


def reads_data(config: Config, topology: Topology, rank: int) -> bool:
    """Whether this rank opens data files."""
    place = topology.coordinates(rank)
    return not config.acceleration.distributed_dataloader or place.pipeline == place.tensor == 0


def reader_of(config: Config, mesh: Mesh) -> Reader:
    """This rank's part of every global batch, and how it comes to it."""
    group = mesh.group(*MODEL_AXES) if config.acceleration.distributed_dataloader else None

    def handed(read: Callable[[], list[Batch]]) -> list[Batch]:
        message = pack_batches(read()) if mesh.is_first(*MODEL_AXES) else Message([], [])
        return unpack_batches(Message(*hand_over(*message, group)))

    slices = mesh.topology.tensor if mesh.topology.sequence_parallel else 1  # of the tokens of a micro-batch
    return Reader(mesh.reader, mesh.topology.readers, slices, read_here if group is None else handed)


def known_to_all(config: Config, mesh: Mesh, dataset: Dataset | None) -> Dataset:
    """The dataset that this rank has opened; where it has not, what the rank that reads for it says of its own."""
    group = mesh.group(*MODEL_AXES) if config.acceleration.distributed_dataloader else None
    if group is None:
        assert dataset is not None
        return dataset
    message = Message(*hand_over(*(pack_index(dataset) if dataset is not None else Message([], [])), group))
    return dataset if dataset is not None else unpack_index(message)

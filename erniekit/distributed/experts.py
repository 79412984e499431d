"""Choose from a layout how tokens reach experts on other ranks."""

from __future__ import annotations

import numpy as np

from erniekit.distributed.mesh import Mesh
from erniekit.distributed.topology import BATCH_AXES
from erniekit.model.moe.dispatch import (
    AllGatherDispatcher,
    AllReduceDispatcher,
    AllToAllDispatcher,
    ExpertParallel,
    LocalDispatcher,
    TokenDispatcher,
)


def expert_ranks(mesh: Mesh, *, gather: bool = False, padded: bool = False) -> ExpertParallel:
    """Build the expert parallelism of a layout for the layers of experts.

    Args:
        gather: dispatch by all-gather instead of all-to-all; ignored if every rank already has all tokens.
        padded: pad transfers of different sizes to the largest.
    """
    topology = mesh.topology

    def all_reduce_loads(loads: np.ndarray) -> np.ndarray:
        loads = mesh.sum(loads, *BATCH_AXES)
        return mesh.sum(loads, "tensor") if topology.sequence_parallel else loads

    group = mesh.group(topology.expert_axis) if topology.expert_axis else None
    dispatcher: TokenDispatcher
    if group is None:
        dispatcher = LocalDispatcher(run_all_experts=topology.world_size > 1)
    elif topology.expert_axis == "tensor" and not topology.sequence_parallel:
        dispatcher = AllReduceDispatcher(group)
    else:
        dispatcher = (AllGatherDispatcher if gather else AllToAllDispatcher)(group, padded)
    return ExpertParallel(dispatcher, all_reduce_loads)

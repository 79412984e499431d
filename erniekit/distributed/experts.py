"""From a layout to the way in which tokens reach the experts that its ranks divide."""

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
    """What layers of experts need to know of the other ranks.

    Args:
        gather: tokens travel by all-gather, not by all-to-all; neither where every rank has them already.
        padded: transfers of different sizes are padded to the largest.
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

"""Groups that form many times over, ranks that are late, and ranks that end."""

from __future__ import annotations

import threading
import time

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import fleet

from erniekit.distributed import cpu_backend
from erniekit.distributed.init import init_mesh
from erniekit.distributed.topology import Topology


def form_many(times: int) -> float:
    """Every pair, and the two halves, `times` times over, used at once and out of step. Returns seconds per round."""
    cpu_backend.apply()
    dist.init_parallel_env()
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [[a, b] for a in range(size) for b in range(a + 1, size)]
    halves = [list(range(size // 2)), list(range(size // 2, size))]
    started = time.monotonic()
    for turn in range(times):
        if turn % size == rank:
            time.sleep(0.01)  # one rank is behind the others, in turn
        for ranks in pairs + halves:
            group = dist.new_group(ranks)
            if rank in ranks:
                tensor = paddle.full([turn + 1], float(rank + turn))
                dist.all_reduce(tensor, group=group)
                assert tensor.tolist() == [float(sum(ranks) + len(ranks) * turn)] * (turn + 1), (turn, ranks)
    return (time.monotonic() - started) / times


def one_is_late(seconds: float) -> float:
    """Rank 1 comes late to a barrier, a reduction, a message and a backward pass. Returns how long rank 0 waited."""
    cpu_backend.apply()
    dist.init_parallel_env()
    rank = dist.get_rank()
    model = paddle.DataParallel(paddle.nn.Linear(2, 2))
    started = time.monotonic()
    for operation in ("barrier", "all_reduce", "message", "backward"):
        if rank == 1:
            time.sleep(seconds)
        tensor = paddle.full([3], float(rank + 1))
        if operation == "barrier":
            dist.barrier()
        elif operation == "all_reduce":
            dist.all_reduce(tensor)
            assert tensor.tolist() == [3.0] * 3
        elif operation == "message":
            dist.send(tensor, 0) if rank == 1 else dist.recv(tensor, 1)
            assert tensor.tolist() == [2.0] * 3
        else:
            model(paddle.full([1, 2], float(rank))).sum().backward()
            np.testing.assert_allclose(model._layers.weight.grad.numpy(), 0.5)  # the mean of 0 and 1
    return time.monotonic() - started


def one_hangs(patience: float) -> None:
    cpu_backend.apply(timeout=patience)
    dist.init_parallel_env()
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.all_reduce(paddle.ones([1]))


def one_ends() -> None:
    cpu_backend.apply()
    dist.init_parallel_env()
    if dist.get_rank() == 1:
        raise ValueError("the seventh sample is bad")
    dist.all_reduce(paddle.ones([1]))


def start_fleet(**degrees: int) -> dict[str, list[int]]:
    """The groups that fleet has made, with a sum over each to show that they work, against the Topology's."""
    cpu_backend.apply()
    strategy = fleet.DistributedStrategy()
    topology = Topology.from_degrees(dist.ParallelEnv().world_size, **degrees)
    strategy.hybrid_configs = {
        "dp_degree": topology.data,
        "pp_degree": topology.pipeline,
        "sharding_degree": topology.sharding,
        "mp_degree": topology.tensor,
    }
    fleet.init(is_collective=True, strategy=strategy)
    groups = fleet.get_hybrid_communicate_group()
    found = {
        "data": groups.get_data_parallel_group(),
        "pipeline": groups.get_pipe_parallel_group(),
        "sharding": groups.get_sharding_parallel_group(),
        "tensor": groups.get_model_parallel_group(),
    }
    rank = dist.get_rank()
    for axis, group in found.items():
        assert group.ranks == topology.group_of(rank, axis)
        if group.nranks > 1:
            tensor = paddle.full([1], float(rank))
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(group.ranks)
    return {axis: group.ranks for axis, group in found.items()}


def one_does_not_join(patience: float) -> None:
    """Rank 1 hangs before groups form."""
    if dist.get_rank() == 1:
        threading.Event().wait()
    init_mesh(Topology(data=3), timeout=patience)

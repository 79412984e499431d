"""Start this process as a rank of a topology: process groups through fleet, on CPU ranks through the CPU backend."""

from __future__ import annotations

import faulthandler
import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed import fleet

from erniekit.distributed import store
from erniekit.distributed.mesh import SINGLE_PROCESS_MESH, Mesh
from erniekit.distributed.rank import RankLostError
from erniekit.distributed.topology import AXES, BATCH_AXES, MODEL_AXES, Axis, Topology


def init_mesh(topology: Topology, *, timeout: float) -> Mesh:
    """Join the other ranks. Every rank calls this before it loads any weight.

    The environment says which rank this process is (PADDLE_TRAINER_ID and related variables, set by the launcher).

    Args:
        timeout: seconds that a rank waits for another one.

    A process whose peers do not come within `timeout` ends with exit code 1; see `join_store`.

    Raises:
        RankLostError: rank 0, which has the store, ended while the groups were formed.
    """
    if topology.world_size == 1:
        return SINGLE_PROCESS_MESH
    if paddle.get_device() == "cpu":
        from erniekit.distributed import cpu_backend

        cpu_backend.apply(timeout)
    os.environ.setdefault("PADDLE_PG_TIMEOUT", str(round(timeout * 1000)))  # for groups on GPUs, in milliseconds
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {
        "dp_degree": topology.data,
        "pp_degree": topology.pipeline,
        "sharding_degree": topology.sharding,
        "mp_degree": topology.tensor,
    }
    with _report_lost_store(), _suppress_fleet_warnings():
        if not dist.is_initialized():  # a second run of a process has met the others before
            join_store(timeout, topology.world_size)
        fleet.init(is_collective=True, strategy=strategy)
        return Mesh(topology, dist.get_rank(), _groups(topology))


def join_store(timeout: float, world_size: int) -> None:
    """Meet the other ranks at the store of rank 0, which the groups are formed through.

    Paddle's store waits 15 minutes for clients and without end for its server, and holds the interpreter's lock
    meanwhile, so no Python code can interrupt it. After `timeout` seconds faulthandler's own thread therefore ends the
    process with its stacks; the launcher recognises this function in them.
    """
    faulthandler.dump_traceback_later(timeout, exit=True, file=sys.__stderr__ or 2)
    try:
        master = os.environ.get("PADDLE_MASTER") or os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0]
        store.join(int(os.environ["PADDLE_TRAINER_ID"]), world_size, master)
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def _report_lost_store() -> Iterator[None]:
    """Raise RankLostError for a lost connection to Paddle's store, so that the launcher reports what ended rank 0."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if "TCP connection" not in str(error):
            raise
        rank = os.environ.get("PADDLE_TRAINER_ID", "?")
        raise RankLostError(f"rank {rank}: rank 0 ended before all ranks had joined ({error})") from None


@contextmanager
def _suppress_fleet_warnings() -> Iterator[None]:
    """Hide fleet's messages for its developers: flags that Paddle changed, and groups without this rank."""
    captured = io.StringIO()
    try:
        with redirect_stderr(captured), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Current global rank .* is not in group")
            yield
    finally:
        lines = captured.getvalue().splitlines(keepends=True)
        sys.stderr.write("".join(line for line in lines if not line.startswith(("=====", "FLAGS("))))


def _groups(topology: Topology) -> dict[tuple[Axis, ...], Any]:
    """Return fleet's groups of single axes, the group of all ranks, and the groups of the batch and
    of the model axes."""
    hybrid = fleet.get_hybrid_communicate_group()
    of_axis = {
        "data": hybrid.get_data_parallel_group,
        "pipeline": hybrid.get_pipe_parallel_group,
        "sharding": hybrid.get_sharding_parallel_group,
        "tensor": hybrid.get_model_parallel_group,
    }
    active_axes: tuple[Axis, ...] = tuple(axis for axis in AXES if topology.degree(axis) > 1)
    groups: dict[tuple[Axis, ...], Any] = {(axis,): of_axis[axis]() for axis in active_axes}
    for axes in (BATCH_AXES, MODEL_AXES):
        if set(axes) < set(active_axes):
            made = [(ranks, dist.new_group(ranks)) for ranks in topology.groups(*axes)]  # a collective call
            groups[axes] = next(group for ranks, group in made if dist.get_rank() in ranks)
    if len(active_axes) > 1:
        groups[active_axes] = dist.get_group(0)
    return groups

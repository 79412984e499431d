"""One small patch for each thing in Paddle 3.3.1 that keeps fleet from running on CPU ranks, with its cause."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import paddle
from paddle.base import core
from paddle.distributed import collective, parallel

from erniekit.distributed.cpu_backend import operators
from erniekit.distributed.cpu_backend.mailboxes import Mailboxes
from erniekit.distributed.cpu_backend.process_group import SocketProcessGroup
from erniekit.distributed.cpu_backend.reducer import Reducer
from erniekit.distributed.cpu_backend.sharding import SHARDING_PATCHES


class Connections:
    """This process's mailboxes, created with the default process group."""

    mailboxes: Mailboxes | None = None


def use_socket_process_groups(timeout: float) -> None:
    """Use SocketProcessGroup. Cause: ProcessGroupGloo (process_group.py says what it lacks).

    The default group connects all ranks; other groups need no communication to form, so they cannot race.
    """
    original = collective._new_process_group_impl

    def new_process_group(  # type: ignore[no-untyped-def]
        backend, store, rank, world_size, group_name, pg_options, group_id=0, *options, **more
    ):
        if backend != "gloo":
            return original(backend, store, rank, world_size, group_name, pg_options, group_id, *options, **more)
        if Connections.mailboxes is None:
            host = os.environ["PADDLE_CURRENT_ENDPOINT"].rsplit(":", 1)[0]
            Connections.mailboxes = Mailboxes(rank, world_size, store, host=host, timeout=timeout)
        if group_name == collective._default_group_name:
            return SocketProcessGroup(Connections.mailboxes, group_id, rank, lambda: range(world_size))
        return SocketProcessGroup(
            Connections.mailboxes, group_id, rank, lambda: collective._get_group_map()[group_id].ranks
        )

    collective._new_process_group_impl = new_process_group
    parallel._new_process_group_impl = new_process_group


def average_gradients_in_python() -> None:
    """Replace the reducer. Cause: paddle.DataParallel passes its process group to C++, which takes its own classes
    only."""
    core.EagerReducer = Reducer


def use_gloo_by_default() -> None:
    """Set the backend variable. Cause: without it `init_parallel_env` looks for NCCL and then rejects a CPU."""
    os.environ.setdefault("PADDLE_DISTRI_BACKEND", "gloo")


def fake_nccl_version() -> None:
    """Define NCCL's version. Cause: `all_reduce` and `reduce_scatter` ask for it before they allow AVG; CPU builds lack
    it."""
    if not hasattr(core, "nccl_version"):
        core.nccl_version = lambda: 21000  # the first version with AVG


def set_device_id() -> None:
    """Set a device id. Cause: `PipelineLayer` reads `ParallelEnv().device_id`, which is set for GPUs and XPUs only."""
    if not hasattr(parallel.ParallelEnv, "_device_id"):
        parallel.ParallelEnv._device_id = 0


def register_cpu_operators() -> None:
    """Add Python operators. Cause: c_identity, c_concat, c_split, c_softmax_with_cross_entropy have no CPU kernels.

    Moreover, mp_ops' own `c_split_eager` splits the last axis in forward and gathers the first in backward.
    """
    from paddle.distributed.fleet.layers.mpu import mp_ops

    for operator in (
        operators.c_identity,
        operators.c_concat,
        operators.c_split,
        operators.c_softmax_with_cross_entropy,
    ):
        setattr(paddle._C_ops, operator.__name__, operator)
    mp_ops.c_split_eager = _Applied(operators.split_on_last_axis)


def skip_cuda_synchronize() -> None:
    """Skip CUDA synchronisation. Cause: fleet's timers (`enable_timer`) wait for a CUDA device."""
    paddle.device.cuda.synchronize = lambda device=None: None


def recompute_without_offload() -> None:
    """Use plain recompute. Cause: `PipelineLayer` uses `recompute_hybrid`, which asserts a GPU; its extras (offloading,
    partitioning activations) have no use on a CPU."""
    from paddle.distributed.fleet.meta_parallel.parallel_layers import pp_layers
    from paddle.distributed.fleet.recompute import recompute

    pp_layers.recompute_hybrid = lambda context, function, *args, **options: recompute(function, *args, **options)


def wait_for_a_local_store() -> None:
    """Wait for the store's port. Cause: a TCPStore client that starts before its server sleeps 3 s before it tries
    again.

    Only for a server on this machine, whose port the kernel lists once it listens.
    """
    original = core.create_or_get_global_tcp_store

    def create_store():  # type: ignore[no-untyped-def]
        if os.environ.get("PADDLE_TRAINER_ID", "0") != "0":
            first = os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")[0]
            host, _, port = (os.environ.get("PADDLE_MASTER") or first).rpartition(":")
            if host in ("127.0.0.1", "localhost"):
                _wait_until_listening(int(port))
        return original()

    core.create_or_get_global_tcp_store = create_store


def _wait_until_listening(port: int, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    tables = [table for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if table.is_file()]
    while tables and time.monotonic() < deadline:
        for table in tables:
            for line in table.read_text(encoding="ascii").splitlines()[1:]:
                _, address, _, state = line.split()[:4]
                if state == "0A" and int(address.rpartition(":")[2], 16) == port:
                    return
        time.sleep(0.02)


class _Applied:
    """Wraps a function for code that calls a PyLayer's `apply`."""

    def __init__(self, function: Callable) -> None:
        self.apply = function


PATCHES: tuple[Callable[[], None], ...] = (
    use_gloo_by_default,
    wait_for_a_local_store,
    average_gradients_in_python,
    fake_nccl_version,
    set_device_id,
    register_cpu_operators,
    skip_cuda_synchronize,
    recompute_without_offload,
    *SHARDING_PATCHES,
)

"""Start a Ray for one run, or connect to a cluster that somebody has started, and leave it again.

Ray is an extra, imported only where `rollout_workers` asks for it. It exchanges pickles between its own processes, so
whoever can write to its ports can run programs: a Ray of our own listens on the loopback address alone, asks for a
token, and has no dashboard.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import ModuleType
from typing import Any

from erniekit.environment import STOP_SIGNALS
from erniekit.errors import TrainingError, UserError
from erniekit.temp_folders import temp_folder

logger = logging.getLogger(__name__)

FOLDERS = "erniekit-ray-"  # of Ray's sockets and logs; short, since the path of a socket has at most 107 bytes
REACH_SECONDS = 10.0  # that a cluster may take to accept a connection
LOOPBACK = "127.0.0.1"
# Ray's switch for systems whose firewalls ask about each socket: off, every address of a local Ray is the loopback one.
_NO_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_LEAST_STORE = 128 << 20  # bytes; Ray wants 75 MiB


def import_ray() -> ModuleType:
    """Import Ray. Raises UserError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise UserError(
            f"rollout_workers: the workers are processes of Ray, which cannot be imported: {error}\n"
            "  Install it: pip install 'erniekit[ray]'   (or write rollout_workers: 0)"
        ) from None
    return ray


@contextmanager
def ray_cluster(address: str, workers: int, weight_bytes: int) -> Iterator[ModuleType]:
    """Have Ray inside the context: the cluster at `address`, or one of this run alone, which ends with the context.

    Args:
        workers: how many processes are to have a processor each.
        weight_bytes: of what is put into the object store before each rollout.

    Raises:
        UserError: Ray is not installed, cannot be started or reached, or the cluster is too small.
    """
    if not address:
        if given := os.environ.get("RAY_ADDRESS"):
            logger.warning(f"RAY_ADDRESS={given} is not used: write `ray_address: {given}` to connect there")
        os.environ[_NO_CLUSTER] = "0"
    # The library of tokenizers warns at each process that is started, unless it was told what to do.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    ray = import_ray()
    if address:
        _check_reachable(address)
    with nullcontext() if address else temp_folder(FOLDERS) as folder:
        settings: dict[str, Any] = {"address": address}
        if not address:
            settings = {
                "address": "local",
                "num_cpus": workers,
                "num_gpus": 0,
                "include_dashboard": False,
                "object_store_memory": max(_LEAST_STORE, 2 * weight_bytes + _LEAST_STORE // 2),
                "_temp_dir": str(folder),
                "_node_ip_address": LOOPBACK,
                "_system_config": {"worker_niceness": 0},  # the run waits for the workers; Ray would say 15
            }
        try:
            _init(ray, address, settings)
            _check_size(ray, address, workers)
            yield ray
        finally:
            with _signal_handlers_kept():
                ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise TrainingError if nothing listens there, for which Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise TrainingError(_not_reached(address, error)) from None


def _init(ray: ModuleType, address: str, settings: dict[str, Any]) -> None:
    try:
        with _signal_handlers_kept():
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **settings)
    except Exception as error:  # of many kinds: sockets, tokens, versions, gRPC
        raise TrainingError(_not_reached(address, error)) from error


def _check_size(ray: ModuleType, address: str, workers: int) -> None:
    """Raise TrainingError if a cluster has fewer processors than workers, which would wait for ever."""
    processors = int(ray.cluster_resources().get("CPU", 0))
    if processors < workers:
        raise TrainingError(
            f"ray_address: {address}: the cluster has {processors} processors, and each of {workers} rollout_workers "
            f"takes one\n  Write at most {processors}, or let more machines join: ray start --address={address}"
        )


def _not_reached(address: str, error: Exception) -> str:
    said = " ".join(str(error).split())
    if address:
        return (
            f"ray_address: {address}: there is no Ray that can be reached: {said}\n"
            "  On the first machine: ray start --head; on the others: ray start --address=HOST:PORT. All need the same "
            "versions of Python and Ray, and RAY_AUTH_MODE=token with the same token, unless the cluster asks for none."
        )
    return f"rollout_workers: Ray cannot be started: {said}\n  Write rollout_workers: 0 to do without."


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Put back the handlers of signals that Ray replaces: SIGTERM asks a run for an orderly end."""
    earlier = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        with suppress(ValueError):  # outside the main thread, where Ray sets none either
            for number, handler in earlier.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

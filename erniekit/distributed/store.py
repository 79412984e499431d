"""The store at which the ranks of a job meet, closed to the network where all of them are on one machine.

Paddle's TCPStore listens on every address of a machine, whatever host it is given, and answers whoever connects. No
setting changes that, so rank 0 opens the server by itself and attaches a filter of packets to its socket: Linux then
drops every packet that was not sent to a loopback address. This needs no rights.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

from paddle.base import core

logger = logging.getLogger(__name__)

_DESCRIPTORS = Path("/proc/self/fd")
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER of Linux
_DESTINATION = 0xFFF00000 + 16  # SKF_NET_OFF of linux/filter.h: in the header of IPv4
_LOOPBACK_ONLY = b"".join(  # struct sock_filter: code, steps where true, steps where false, value
    struct.pack("=HBBI", *step)
    for step in (
        (0x20, 0, 0, _DESTINATION),  # load the destination's address
        (0x54, 0, 0, 0xFF000000),  # and keep its first byte
        (0x15, 0, 1, 0x7F000000),  # is it 127?
        (0x06, 0, 0, 0xFFFFFFFF),  # take the packet
        (0x06, 0, 0, 0),  # drop it
    )
)
_JOINED = "erniekit/joined"
_server: core.TCPStore | None = None  # of rank 0; it lives as long as the process


def join(rank: int, world_size: int, master: str) -> None:
    """Create Paddle's global store, through which groups are formed. Rank 0 returns when all ranks have come.

    Args:
        master: host:port of the server, which is in rank 0.
    """
    host, _, port = master.rpartition(":")
    if not host.startswith("127."):
        core.create_or_get_global_tcp_store()
        return
    if rank == 0:
        global _server
        _server = core.TCPStore(host, int(port), True, 0)
        if not confine_to_loopback(int(port)):
            logger.warning(f"port {port}, at which the ranks meet, is open to the network: this system cannot close it")
    store = _global_client(rank)
    store.add(_JOINED, 1)
    while rank == 0 and store.add(_JOINED, 0) < world_size:
        time.sleep(0.01)


def confine_to_loopback(port: int) -> bool:
    """Drop all packets to a port that this process listens on, but those to 127.0.0.0/8; return whether that worked."""
    program = ctypes.create_string_buffer(_LOOPBACK_ONLY)
    attached = struct.pack("HP", len(_LOOPBACK_ONLY) // 8, ctypes.addressof(program))
    for descriptor in _DESCRIPTORS.iterdir() if _DESCRIPTORS.is_dir() else ():
        with suppress(OSError):  # closed meanwhile, as that of the listing; or a system that forbids filters
            if not os.readlink(descriptor).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor.name))) as found:
                listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and found.family == socket.AF_INET and found.getsockname()[1] == port:
                    found.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, attached)
                    return True
    return False


def _global_client(rank: int) -> core.TCPStore:
    """Create Paddle's global store without a server: it would open one in the rank that the environment calls 0."""
    os.environ["PADDLE_TRAINER_ID"] = str(max(1, rank))
    try:
        return core.create_or_get_global_tcp_store()
    finally:
        os.environ["PADDLE_TRAINER_ID"] = str(rank)

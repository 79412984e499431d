"""Ranks that meet."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from erniekit.distributed.init import init_mesh
from erniekit.distributed.topology import Topology


def open_ports() -> dict[str, int]:
    """Meet the others and return, for each address this rank listens on, the steps of its filter of packets."""
    init_mesh(Topology.from_degrees(2), timeout=60)
    found = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(descriptor.name))) as each:
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                steps = each.getsockopt(socket.SOL_SOCKET, 26, 512)  # SO_GET_FILTER, which counts in steps
                found[str(each.getsockname()[0])] = len(steps)
    return found

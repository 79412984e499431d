"""Wait until every rank has started, before Paddle does, so that a missing rank is named. Needs no Paddle.

Cause: Paddle's store waits for its server without limit and for its clients 15 minutes, whatever timeout is declared,
and cannot be interrupted meanwhile.
"""

from __future__ import annotations

import socket
import struct
import time

from erniekit.distributed.rank import RankLostError, RankTimeoutError

RANK = struct.Struct("<q")
GO = b"go"
RETRY_INTERVAL = 0.05  # seconds until a rank tries again to reach rank 0
EXTRA_TIMEOUT = 2.0  # seconds that others wait longer than rank 0, which can name the missing ranks


def wait_for_all_ranks(rank: int, world_size: int, address: tuple[str, int], timeout: float) -> None:
    """Wait until all ranks have joined.

    Args:
        address: host and port of rank 0; the port is free again afterwards.
        timeout: seconds to wait.

    Raises:
        RankTimeoutError: a rank did not join in time.
        RankLostError: rank 0 has ended.
    """
    deadline = time.monotonic() + timeout
    if rank == 0:
        _wait_for_all(world_size, address, timeout, deadline)
    else:
        _wait_for_go(rank, address, timeout, deadline)


def _wait_for_all(world_size: int, address: tuple[str, int], timeout: float, deadline: float) -> None:
    connected: dict[int, socket.socket] = {}
    try:
        with socket.create_server(("", address[1]), backlog=world_size) as server:  # as the store does
            while len(connected) < world_size - 1:
                server.settimeout(max(0.001, deadline - time.monotonic()))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, world_size)) - connected.keys())
                    raise RankTimeoutError(f"rank 0: ranks {missing} did not join within {timeout:g} s") from None
                peer_rank = _peer_rank(connection, world_size)
                if peer_rank is None:
                    connection.close()  # an unknown peer
                else:
                    connected[peer_rank] = connection
        for connection in connected.values():  # the port is free now, so they will find the store
            connection.sendall(GO)
    finally:
        for connection in connected.values():
            connection.close()


def _wait_for_go(rank: int, address: tuple[str, int], timeout: float, deadline: float) -> None:
    while True:
        try:
            connection = socket.create_connection(address, timeout=max(0.001, deadline - time.monotonic()))
            break
        except OSError:
            if time.monotonic() > deadline:
                raise RankTimeoutError(
                    f"rank {rank}: rank 0 did not open {address[0]}:{address[1]} within {timeout:g} s"
                ) from None
            time.sleep(RETRY_INTERVAL)
    with connection:
        try:
            connection.sendall(RANK.pack(rank))
            connection.settimeout(timeout + EXTRA_TIMEOUT)  # rank 0 began to wait earlier
            answer = connection.recv(len(GO))
        except TimeoutError:
            raise RankTimeoutError(f"rank {rank}: not all ranks joined within {timeout:g} s") from None
        except OSError:
            answer = b""
        if answer != GO:
            raise RankLostError(f"rank {rank}: rank 0 has ended before all ranks had joined")


def _peer_rank(connection: socket.socket, world_size: int) -> int | None:
    """Return the rank that opened a connection, or None for an unknown peer."""
    connection.settimeout(10)  # a rank sends its number at once
    try:
        data = connection.recv(RANK.size, socket.MSG_WAITALL)
    except OSError:
        return None
    rank = RANK.unpack(data)[0] if len(data) == RANK.size else 0
    return rank if 0 < rank < world_size else None

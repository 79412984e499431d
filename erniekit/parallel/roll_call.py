"""Every rank says that it is there, before Paddle waits for all of them: a rank that does not come is then named.

Cause: Paddle's store waits for its server without end and for its clients 15 minutes, whatever timeout is declared, and
cannot be interrupted meanwhile. No Paddle here.
"""

from __future__ import annotations

import socket
import struct
import time

from erniekit.parallel.rank import RankLostError, RankSilentError

RANK = struct.Struct("<q")
GO = b"go"
AGAIN = 0.05  # seconds until a rank tries again to reach rank 0
LATER = 2.0  # seconds that others wait longer than rank 0, which alone can name who is missing


def call_roll(rank: int, world_size: int, address: tuple[str, int], timeout: float) -> None:
    """Return when all ranks have called.

    Args:
        address: host and port of rank 0, where nothing listens afterwards.
        timeout: seconds to wait.

    Raises:
        RankSilentError: a rank has not come in time.
        RankLostError: rank 0 has ended.
    """
    ends = time.monotonic() + timeout
    if rank == 0:
        _wait_for_all(world_size, address, timeout, ends)
    else:
        _wait_for_go(rank, address, timeout, ends)


def _wait_for_all(world_size: int, address: tuple[str, int], timeout: float, ends: float) -> None:
    come: dict[int, socket.socket] = {}
    try:
        with socket.create_server(("", address[1]), backlog=world_size) as server:  # as the store does
            while len(come) < world_size - 1:
                server.settimeout(max(0.001, ends - time.monotonic()))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, world_size)) - come.keys())
                    raise RankSilentError(f"rank 0: ranks {missing} have not come within {timeout:g} s") from None
                caller = _caller(connection, world_size)
                if caller is None:
                    connection.close()  # a stranger
                else:
                    come[caller] = connection
        for connection in come.values():  # nothing listens any more, so that they find the store and not this
            connection.sendall(GO)
    finally:
        for connection in come.values():
            connection.close()


def _wait_for_go(rank: int, address: tuple[str, int], timeout: float, ends: float) -> None:
    while True:
        try:
            connection = socket.create_connection(address, timeout=max(0.001, ends - time.monotonic()))
            break
        except OSError:
            if time.monotonic() > ends:
                raise RankSilentError(
                    f"rank {rank}: rank 0 has not come to {address[0]}:{address[1]} within {timeout:g} s"
                ) from None
            time.sleep(AGAIN)
    with connection:
        try:
            connection.sendall(RANK.pack(rank))
            connection.settimeout(timeout + LATER)  # from now on: rank 0 had begun to wait before
            answer = connection.recv(len(GO))
        except TimeoutError:
            raise RankSilentError(f"rank {rank}: not all ranks have come within {timeout:g} s") from None
        except OSError:
            answer = b""
        if answer != GO:
            raise RankLostError(f"rank {rank}: rank 0 has ended before all ranks had come")


def _caller(connection: socket.socket, world_size: int) -> int | None:
    """The rank that calls, or None for a stranger."""
    connection.settimeout(10)  # a rank says its number at once
    try:
        said = connection.recv(RANK.size, socket.MSG_WAITALL)
    except OSError:
        return None
    rank = RANK.unpack(said)[0] if len(said) == RANK.size else 0
    return rank if 0 < rank < world_size else None

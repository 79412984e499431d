"""Messages between the ranks of a job: a TCP connection per ordered pair of ranks, a mailbox per sender and channel.

No Paddle; only raw bytes are sent. A thread for each incoming connection puts messages into their mailboxes, so a
sender never waits for the receiver: two ranks may send to each other at the same time, and a sender may run ahead.
Messages of one sender on one channel are received in the order in which they were sent.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from collections import Counter, defaultdict, deque
from typing import Protocol

import numpy as np

from erniekit.distributed.rank import RankLostError, RankTimeoutError

Channel = tuple[int, int]  # a group and a kind of message within it
HEADER = struct.Struct("<qqq")  # channel (two numbers), number of bytes that follow
GREETING = struct.Struct("<q16s")  # rank, the job's secret
SMALL_MESSAGE = 1 << 16  # bytes; a smaller message is sent together with its header, in one packet


class Store(Protocol):
    """The key-value store that all ranks share before they are connected; `get` waits for the key."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


class Mailboxes:
    """This rank's connections to all others.

    Args:
        rank, world_size: this rank, and the number of ranks.
        store: where the ranks publish their addresses.
        host: the address of this machine that the others can reach.
        timeout: seconds to wait for another rank's message, or for it to accept one.
    """

    def __init__(self, rank: int, world_size: int, store: Store, *, host: str, timeout: float) -> None:
        self.rank = rank
        self.timeout = timeout
        self.sent: Counter[int] = Counter()  # group -> bytes sent by this rank, without headers
        self._boxes: defaultdict[tuple[int, Channel], deque[np.ndarray]] = defaultdict(deque)
        self._lost: set[int] = set()
        self._arrived = threading.Condition()
        self._outgoing: dict[int, socket.socket] = {}
        self._send_locks: dict[int, threading.Lock] = {}
        self._connect(world_size, store, host)

    def send(self, to: int, channel: Channel, data: memoryview) -> None:
        """Send bytes to a rank; return when the operating system has taken them.

        Raises:
            RankLostError: the rank has ended.
            RankTimeoutError: it has accepted nothing for `timeout` seconds.
        """
        header = HEADER.pack(*channel, data.nbytes)
        connection = self._outgoing[to]
        try:
            with self._send_locks[to]:
                if data.nbytes < SMALL_MESSAGE:
                    connection.sendall(header + data.tobytes())
                else:
                    connection.sendall(header)
                    connection.sendall(data)
        except TimeoutError:
            raise RankTimeoutError(
                f"rank {self.rank}: rank {to} has taken no data for {self.timeout:g} s (group {channel[0]})"
            ) from None
        except OSError as error:
            raise RankLostError(f"rank {self.rank}: rank {to} has ended ({error}), so nothing can be sent") from None
        self.sent[channel[0]] += data.nbytes

    def receive(self, source: int, channel: Channel) -> np.ndarray:
        """Return the next message of a rank on a channel, as bytes (uint8).

        Raises:
            RankLostError: the rank has ended without sending one.
            RankTimeoutError: it has sent none for `timeout` seconds.
        """
        with self._arrived:
            box = self._boxes[source, channel]
            self._arrived.wait_for(lambda: box or source in self._lost, self.timeout)
            if box:
                return box.popleft()
            if source in self._lost:
                raise RankLostError(f"rank {self.rank}: rank {source} has ended, so its message will not come")
        raise RankTimeoutError(
            f"rank {self.rank}: rank {source} has sent nothing for {self.timeout:g} s (group {channel[0]}); it hangs, "
            f"or is slower than the time allowed"
        )

    def _connect(self, world_size: int, store: Store, host: str) -> None:
        with socket.create_server((host, 0), backlog=world_size) as server:
            server.settimeout(self.timeout)
            if self.rank == 0:
                store.set("erniekit/secret", secrets.token_hex(8))
            secret = bytes(store.get("erniekit/secret"))
            store.set(f"erniekit/mailboxes/{self.rank}", f"{host}:{server.getsockname()[1]}")
            others = [rank for rank in range(world_size) if rank != self.rank]
            for rank in others:
                address, port = bytes(store.get(f"erniekit/mailboxes/{rank}")).decode().rsplit(":", 1)
                connection = socket.create_connection((address, int(port)), timeout=self.timeout)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(GREETING.pack(self.rank, secret))
                self._outgoing[rank] = connection
                self._send_locks[rank] = threading.Lock()
            awaited = set(others)
            while awaited:
                connection, _ = server.accept()
                source = _read_greeting(connection, secret)
                if source in awaited:
                    awaited.remove(source)
                    threading.Thread(target=self._receive_loop, args=(source, connection), daemon=True).start()
                else:
                    connection.close()  # not a rank of this job

    def _receive_loop(self, source: int, connection: socket.socket) -> None:
        """Put a rank's messages into its mailboxes until it ends."""
        try:
            while True:
                group, kind, size = HEADER.unpack(_recv_exactly(connection, HEADER.size).data)
                message = _recv_exactly(connection, size)
                with self._arrived:
                    self._boxes[source, (group, kind)].append(message)
                    self._arrived.notify_all()
        except (EOFError, OSError):
            with self._arrived:
                self._lost.add(source)
                self._arrived.notify_all()


def _recv_exactly(connection: socket.socket, size: int) -> np.ndarray:
    """Read exactly `size` bytes from a connection."""
    data = np.empty(size, np.uint8)
    view, got = data.data, 0
    while got < size:
        count = connection.recv_into(view[got:])
        if count == 0:
            raise EOFError
        got += count
    return data


def _read_greeting(connection: socket.socket, secret: bytes) -> int | None:
    """Return the rank that opened a connection, or None for an unknown peer."""
    connection.settimeout(10)  # a rank of the job sends its greeting at once
    try:
        rank, given = GREETING.unpack(_recv_exactly(connection, GREETING.size).data)
    except (EOFError, OSError):
        return None
    connection.settimeout(None)  # `receive` applies the timeout
    return rank if secrets.compare_digest(given, secret) else None

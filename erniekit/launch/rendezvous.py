"""The launchers of a job that runs on several machines: how they find each other and what they tell each other.

No Paddle. The launcher that listens at MASTER_ADDR:MASTER_PORT is node 0; the others stay connected to it for as long
as the job runs. Messages are lines of JSON, and nothing that arrives is ever run.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from erniekit import __version__
from erniekit.errors import ConfigurationError
from erniekit.launch.local import NodeRanks, endpoints

DEFAULT_MASTER = ("127.0.0.1", 8080)
GREETING_TIMEOUT = 10.0  # seconds for whoever connects to say who it is
KEEPALIVE = {  # a machine that is gone is noticed after 10 s, whether or not something is on its way to it
    "TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000,
}  # fmt: skip
Message = dict[str, Any]


class NodeLostError(RuntimeError):
    """The launcher of another node is gone."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the launchers of a job meet.

    Attributes:
        nodes: how many there are.
        address: host and port at which node 0 listens.
        node_rank: of this node; None: the launcher on the machine of `address` is node 0, the others as they come.
    """

    nodes: int
    address: tuple[str, int]
    node_rank: int | None = None

    @classmethod
    def from_environment(cls) -> Rendezvous | None:
        """What NNODES, MASTER_ADDR, MASTER_PORT and NODE_RANK say; None for one node.

        Raises:
            ConfigurationError: a variable is not what it should be.
        """
        nodes = _int_from_environment("NNODES", 1, least=1)
        if nodes == 1:
            return None
        node_rank = _int_from_environment("NODE_RANK", 0, least=0) if os.environ.get("NODE_RANK") else None
        if node_rank is not None and node_rank >= nodes:
            raise ConfigurationError(f"NODE_RANK={node_rank}: with NNODES={nodes} the nodes are 0 to {nodes - 1}")
        host, port = DEFAULT_MASTER
        port = _int_from_environment("MASTER_PORT", port, least=1, most=65_535)
        return cls(nodes, (os.environ.get("MASTER_ADDR", host), port), node_rank)

    def __str__(self) -> str:
        return f"{self.address[0]}:{self.address[1]} (MASTER_ADDR, MASTER_PORT)"

    @property
    def is_loopback(self) -> bool:
        """Whether other machines cannot come there."""
        return self.address[0] == "localhost" or self.address[0].startswith("127.")


@dataclass
class Nodes:
    """This launcher among those of the job. `links` of node 0 lead to all others, in their order; theirs to node 0."""

    node_rank: int = 0
    hosts: tuple[str, ...] = ("127.0.0.1",)
    counts: tuple[int, ...] = (1,)  # ranks on each node
    links: Sequence[_Link] = ()
    alarms: list[Any] = field(default_factory=list)

    def local_ranks(self, port: int) -> NodeRanks:
        """The ranks of this node when rank 0 listens on `port`."""
        each = [endpoints(host, port, count) for host, count in zip(self.hosts, self.counts, strict=True)]
        return NodeRanks(sum(self.counts[: self.node_rank]), self.counts[self.node_rank], tuple(sum(each, ())))

    def broadcast(self, value: Any) -> Any:
        """What node 0 has said, on every node."""
        if self.node_rank == 0:
            for link in self.links:
                link.send({"agree": value})
            return value
        return self._wait_for(self.links[0], "agree")

    def gather(self, value: Any) -> list[Any]:
        """On node 0 what every node has said, in their order; elsewhere nothing."""
        if self.node_rank > 0:
            self.links[0].send({"collect": value})
            return []
        return [value, *(self._wait_for(link, "collect") for link in self.links)]

    def broadcast_alarm(self, value: Any) -> None:
        """Have `value` among what all other nodes hear when they listen."""
        for link in self.links:
            link.send({"alarm": value})

    def poll_alarms(self) -> list[Any]:
        """What other nodes have called out so far, oldest first; never waits.

        Raises:
            NodeLostError: another node is gone.
        """
        self._receive_messages()
        return self.alarms

    def _receive_messages(self, wait: float = 0.0) -> None:
        """Take in what has arrived; node 0 passes alarms on. With `wait`, give each link that many seconds."""
        for link in self.links:
            link.drain(wait)
            while link.alarms:
                alarm = link.alarms.pop(0)
                self.alarms.append(alarm)
                for other in self.links:
                    if other is not link:
                        other.send({"alarm": alarm})
        lost = [link.peer for link in self.links if link.lost and not any(link.values.values())]
        if lost:
            raise NodeLostError(f"the launcher of {', '.join(lost)} is gone")

    def _wait_for(self, link: _Link, kind: str) -> Any:
        while not link.values[kind]:
            self._receive_messages(wait=0.1)
        return link.values[kind].pop(0)


class _Link:
    """A connection to another launcher."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.peer = peer
        self.lost = False
        self.alarms: list[Any] = []
        self.values: dict[str, list[Any]] = {"agree": [], "collect": []}
        self._connection = connection
        self._arrived: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message; to a launcher that is gone, nothing."""
        with suppress(OSError):  # reading notices it, too
            self._connection.sendall(_line(message))

    def drain(self, wait: float = 0.0) -> None:
        """Sort what has arrived; with `wait`, give something that many seconds to arrive."""
        with suppress(queue.Empty):
            while True:
                message = self._arrived.get(timeout=wait) if wait else self._arrived.get_nowait()
                wait = 0.0
                if message is None:
                    self.lost = True
                elif "alarm" in message:
                    self.alarms.append(message["alarm"])
                else:
                    for kind in self.values.keys() & message.keys():
                        self.values[kind].append(message[kind])

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self) -> None:
        with suppress(OSError, ValueError), self._connection.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                if isinstance(message, dict):
                    self._arrived.put(message)
        self._arrived.put(None)


@contextmanager
def connect_nodes(rendezvous: Rendezvous | None, ranks: int, timeout: float) -> Iterator[Nodes]:
    """Meet the launchers of the other nodes, and part from them at the end.

    Args:
        rendezvous: None for one node.
        ranks: the number of ranks on this node.
        timeout: seconds to wait for the others.

    Raises:
        ConfigurationError: they do not come, or do not fit together.
    """
    if rendezvous is None:
        yield Nodes(counts=(ranks,))
        return
    server = _listen(rendezvous)
    deadline = time.monotonic() + timeout
    nodes = _join(rendezvous, ranks, deadline) if server is None else _gather(rendezvous, server, ranks, deadline)
    try:
        yield nodes
    finally:
        for link in nodes.links:
            link.close()


def _listen(rendezvous: Rendezvous) -> socket.socket | None:
    """The socket of node 0; None on the other nodes."""
    if rendezvous.node_rank not in (None, 0):
        return None
    host, port = rendezvous.address
    try:
        return socket.create_server((host, port), backlog=rendezvous.nodes)
    except OSError as error:
        address_is_remote = error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE)
        if rendezvous.node_rank is None and address_is_remote:
            return None
        if (
            rendezvous.node_rank == 0 and error.errno == errno.EADDRNOTAVAIL
        ):  # a name of this machine that only others know
            return socket.create_server(("", port), backlog=rendezvous.nodes)
        raise ConfigurationError(
            f"{rendezvous}: cannot listen there: {(error.strerror or str(error)).partition(' (while ')[0]}\n"
            "  write an address of node 0 and a port that is free there, the same on every node"
        ) from None


def _gather(rendezvous: Rendezvous, server: socket.socket, ranks: int, deadline: float) -> Nodes:
    """Node 0: wait for the others, number them, and tell each of all."""
    joined: list[tuple[socket.socket, Message, str]] = []
    with server:
        while len(joined) < rendezvous.nodes - 1:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, (host, *_) = server.accept()
            except TimeoutError:
                raise ConfigurationError(
                    f"{len(joined) + 1} of {rendezvous.nodes} nodes (NNODES) have come to {rendezvous} in time\n"
                    "  start the same command on every node; distributed_timeout says how long they wait"
                ) from None
            greeting = _read_greeting(connection)
            if greeting is None:
                connection.close()  # a stranger
            else:
                joined.append((connection, greeting, host))
    node_ranks = _assign_node_ranks([greeting.get("number") for _, greeting, _ in joined])
    problem = _problem([greeting for _, greeting, _ in joined], node_ranks)
    if problem:
        for connection, _, _ in joined:
            with suppress(OSError):
                connection.sendall(_line({"refused": problem}))
            connection.close()
        raise ConfigurationError(problem)
    joined = [entry for _, entry in sorted(zip(node_ranks, joined, strict=True), key=lambda pair: pair[0])]
    hosts = (rendezvous.address[0], *(host for _, _, host in joined))
    counts = (ranks, *(int(greeting["ranks"]) for _, greeting, _ in joined))
    for node_rank, (connection, _, _) in enumerate(joined, start=1):
        connection.sendall(_line({"node": node_rank, "hosts": hosts, "counts": counts}))
    links = [_Link(connection, f"node {node_rank}") for node_rank, (connection, _, _) in enumerate(joined, start=1)]
    return Nodes(0, hosts, counts, links)


def _join(rendezvous: Rendezvous, ranks: int, deadline: float) -> Nodes:
    """Any other node: find node 0, say who this is, and hear of all."""
    connection = _connect(rendezvous, deadline)
    try:
        connection.sendall(_line({"erniekit": __version__, "ranks": ranks, "number": rendezvous.node_rank}))
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        answer = _read_line(connection)
    except OSError:
        answer = None
    if answer is not None and "refused" in answer:
        raise ConfigurationError(str(answer["refused"]))
    if answer is None or not {"node", "hosts", "counts"} <= answer.keys():
        raise ConfigurationError(
            f"{rendezvous}: node 0 has not answered; does a launcher of ERNIEKit listen there, and have all "
            f"{rendezvous.nodes} nodes (NNODES) been started?"
        )
    counts = tuple(int(count) for count in answer["counts"])
    return Nodes(int(answer["node"]), tuple(map(str, answer["hosts"])), counts, [_Link(connection, "node 0")])


def _connect(rendezvous: Rendezvous, deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection(rendezvous.address, timeout=GREETING_TIMEOUT)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigurationError(f"{rendezvous}: node 0 cannot be reached: {error.strerror or error}") from None
            time.sleep(0.2)


def _read_greeting(connection: socket.socket) -> Message | None:
    """What a launcher says of itself, or None for something else."""
    connection.settimeout(GREETING_TIMEOUT)
    try:
        greeting = _read_line(connection)
    except OSError:
        return None
    if greeting is None or not isinstance(greeting.get("ranks"), int):
        return None
    return greeting if "erniekit" in greeting and isinstance(greeting.get("number"), int | None) else None


def _assign_node_ranks(wanted: Sequence[Any]) -> list[int]:
    """A number for each node that has joined: what it wants, otherwise the first free one."""
    free = iter([node_rank for node_rank in range(1, len(wanted) + 1) if node_rank not in wanted])
    return [next(free) if node_rank is None else int(node_rank) for node_rank in wanted]


def _problem(greetings: Sequence[Message], node_ranks: Sequence[int]) -> str:
    """Why these nodes cannot work together; empty where they can."""
    versions = {str(greeting["erniekit"]) for greeting in greetings} - {__version__}
    if versions:
        return f"the nodes run different versions of ERNIEKit: {__version__} and {', '.join(sorted(versions))}"
    if sorted(node_ranks) != list(range(1, len(node_ranks) + 1)):
        return f"NODE_RANK must be another one on every node, and beside node 0 they are {sorted(node_ranks)}"
    return ""


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _read_line(connection: socket.socket, limit: int = 1 << 16) -> Message | None:
    """One message, byte by byte so that nothing of the next is taken; None for what is none."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(line) > limit:
            return None
        line += byte
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _int_from_environment(name: str, default: int, *, least: int, most: int | None = None) -> int:
    word = os.environ.get(name, "").strip() or str(default)
    if not word.isdecimal() or int(word) < least or (most is not None and int(word) > most):
        raise ConfigurationError(f"{name}={word}: write a whole number from {least} {f'to {most}' if most else 'on'}")
    return int(word)

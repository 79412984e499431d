"""Launchers of one job on several machines: here several threads that meet on loopback."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from erniekit.errors import ConfigurationError
from erniekit.launch import rendezvous as module
from erniekit.launch.local import NodeRanks, free_port
from erniekit.launch.rendezvous import NodeLostError, Nodes, Rendezvous, connect_nodes


def meet(do: Callable[[Nodes], Any], *numbers: int | None, counts: tuple[int, ...] | None = None) -> list[Future]:
    """Have a launcher for each number of a node meet the others and call `do`; what came of each."""
    address = ("127.0.0.1", free_port("127.0.0.1"))

    def launcher(number: int | None, count: int) -> Any:
        while number is None and 0 in numbers and not _listens(address):
            time.sleep(0.01)  # all are on the machine of the address here, where the first without a number is node 0
        with connect_nodes(Rendezvous(len(numbers), address, number), count, timeout=10) as nodes:
            return do(nodes)

    with ThreadPoolExecutor(len(numbers)) as pool:
        return [pool.submit(launcher, *pair) for pair in zip(numbers, counts or (1,) * len(numbers), strict=True)]


def _listens(address: tuple[str, int]) -> bool:
    with socket.socket() as stranger:
        return stranger.connect_ex(address) == 0


def test_one_node_needs_no_meeting() -> None:
    with connect_nodes(None, 3, timeout=1) as nodes:
        assert nodes.broadcast("a") == "a" and nodes.gather("b") == ["b"] and nodes.poll_alarms() == []
        assert nodes.local_ranks(7000).ranks == range(3)


def test_every_node_knows_its_ranks() -> None:
    def block(nodes: Nodes) -> NodeRanks:
        return nodes.local_ranks(nodes.broadcast(7000 + nodes.node_rank))

    blocks = [future.result() for future in meet(block, 2, 0, 1, counts=(3, 1, 2))]
    assert [list(block.ranks) for block in blocks] == [[3, 4, 5], [0], [1, 2]]
    assert {block.endpoints[0] for block in blocks} == {"127.0.0.1:7000"}  # what node 0 says
    assert {block.world_size for block in blocks} == {6}
    assert blocks[0].environment(4, gpu=True) == {
        "FLAGS_selected_gpus": "1",
        "PADDLE_TRAINER_ID": "4",
        "PADDLE_TRAINERS_NUM": "6",
        "PADDLE_LOCAL_RANK": "1",
        "PADDLE_LOCAL_SIZE": "3",
        "PADDLE_MASTER": "127.0.0.1:7000",
        "PADDLE_TRAINER_ENDPOINTS": ",".join(blocks[0].endpoints),
        "PADDLE_CURRENT_ENDPOINT": blocks[0].endpoints[4],
    }


def test_without_numbers_the_first_to_listen_is_node_0() -> None:
    found = [future.result() for future in meet(lambda nodes: nodes.node_rank, None, None, None)]
    assert sorted(found) == [0, 1, 2]


def test_a_number_that_is_wanted_is_kept() -> None:
    assert [future.result() for future in meet(lambda nodes: nodes.node_rank, 0, None, 1)] == [0, 2, 1]


def test_node_0_hears_all_in_their_order_and_all_hear_node_0() -> None:
    def talk(nodes: Nodes) -> tuple[list[int], str]:
        collected = nodes.gather(10 * nodes.node_rank)
        return collected, nodes.broadcast(f"decided by {nodes.node_rank}")

    found = [future.result() for future in meet(talk, 0, 1, 2)]
    assert [collected for collected, _ in found] == [[0, 10, 20], [], []]
    assert {decided for _, decided in found} == {"decided by 0"}


def test_an_alarm_reaches_all_nodes_through_node_0() -> None:
    def poll_alarms(nodes: Nodes) -> list[str]:
        if nodes.node_rank == 2:
            nodes.broadcast_alarm("fire")
        ends = time.monotonic() + 10
        while nodes.node_rank != 2 and not nodes.poll_alarms() and time.monotonic() < ends:
            time.sleep(0.01)
        heard = list(nodes.alarms)
        nodes.gather(None)
        nodes.broadcast(None)
        return heard

    assert [future.result() for future in meet(poll_alarms, 0, 1, 2)] == [["fire"], ["fire"], []]


def test_an_alarm_is_passed_on_while_node_0_waits() -> None:
    def poll_alarms(nodes: Nodes) -> list[str]:
        if nodes.node_rank == 2:
            nodes.broadcast_alarm("fire")
        ends = time.monotonic() + 10
        while nodes.node_rank == 1 and not nodes.poll_alarms() and time.monotonic() < ends:
            time.sleep(0.01)
        nodes.gather(None)
        nodes.broadcast(None)
        return nodes.alarms

    assert meet(poll_alarms, 0, 1, 2)[1].result() == ["fire"]


@pytest.mark.parametrize("gone", [0, 1])
def test_a_launcher_that_is_gone_is_noticed(gone: int) -> None:
    def wait(nodes: Nodes) -> None:
        ends = time.monotonic() + 10
        while nodes.node_rank != gone and time.monotonic() < ends:
            nodes.poll_alarms()
            time.sleep(0.01)

    futures = meet(wait, 0, 1)
    assert futures[gone].exception() is None
    error = futures[1 - gone].exception()
    assert isinstance(error, NodeLostError) and f"node {gone} is gone" in str(error)


def test_who_waits_for_node_0_notices_its_end() -> None:
    futures = meet(lambda nodes: nodes.node_rank and nodes.broadcast(None), 0, 1)
    assert isinstance(futures[1].exception(), NodeLostError)


def test_two_nodes_of_one_number_are_refused_on_all() -> None:
    for future in meet(lambda nodes: None, 0, 1, 1):
        with pytest.raises(ConfigurationError, match="NODE_RANK must be another one on every node"):
            future.result()


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    address = ("127.0.0.1", free_port("127.0.0.1"))
    line = module._line({"erniekit": "0.0.0", "ranks": 1, "number": None})
    answers = []

    def old_launcher() -> None:
        with socket.create_connection(address, timeout=10) as connection:
            connection.sendall(line)
            answers.append(connection.makefile("rb").readline())

    def later() -> None:
        while True:
            try:
                return old_launcher()
            except ConnectionRefusedError:
                time.sleep(0.02)

    thread = threading.Thread(target=later)
    thread.start()
    with pytest.raises(ConfigurationError, match=r"different versions of ERNIEKit: .* and 0\.0\.0"):  # noqa: SIM117
        with connect_nodes(Rendezvous(2, address, 0), 1, timeout=10):
            pass
    thread.join()
    assert b"different versions" in answers[0]


def test_a_stranger_is_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    address = ("127.0.0.1", free_port("127.0.0.1"))
    joined = []

    def unknown_peer_then_node() -> None:
        while True:
            try:
                with socket.create_connection(address, timeout=10) as connection:
                    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
        with connect_nodes(Rendezvous(2, address, 1), 1, timeout=10) as nodes:
            joined.append(nodes.node_rank)

    thread = threading.Thread(target=unknown_peer_then_node)
    thread.start()
    with connect_nodes(Rendezvous(2, address, 0), 1, timeout=10) as nodes:
        assert len(nodes.links) == 1
        thread.join()
    assert joined == [1]


def test_nodes_that_do_not_come_are_counted() -> None:
    address = ("127.0.0.1", free_port("127.0.0.1"))
    with (
        pytest.raises(ConfigurationError, match="1 of 2 nodes"),
        connect_nodes(Rendezvous(2, address, 0), 1, timeout=0.2),
    ):
        pass
    with (
        pytest.raises(ConfigurationError, match="node 0 cannot be reached"),
        connect_nodes(Rendezvous(2, address, 1), 1, 0.2),
    ):
        pass


def test_something_else_that_listens_is_told_from_node_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        rendezvous = Rendezvous(2, ("127.0.0.1", other.getsockname()[1]))
        with pytest.raises(ConfigurationError, match="node 0 has not answered"), connect_nodes(rendezvous, 1, 0.3):
            pass


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"NNODES": "1"}, None),
        ({"NNODES": "2"}, Rendezvous(2, ("127.0.0.1", 8080))),
        (
            {"NNODES": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "99", "NODE_RANK": "1"},
            Rendezvous(2, ("10.0.0.1", 99), 1),
        ),
    ],
)
def test_the_environment_says_where_to_meet(
    variables: dict, expected: Rendezvous | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NNODES", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Rendezvous.from_environment() == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NNODES": "two"}, "NNODES=two: write a whole number"),
        ({"NNODES": "2", "MASTER_PORT": "0"}, "MASTER_PORT=0"),
        ({"NNODES": "2", "MASTER_PORT": "99999"}, "MASTER_PORT=99999: write a whole number from 1 to 65535"),
        ({"NNODES": "2", "NODE_RANK": "2"}, "the nodes are 0 to 1"),
    ],
)
def test_variables_that_mean_nothing_are_refused(
    variables: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=message):
        Rendezvous.from_environment()

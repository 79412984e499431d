"""Where ranks of one machine meet, nobody else does."""

from __future__ import annotations

import socket
import sys

import pytest

from erniekit.distributed.store import confine_to_loopback
from tests.distributed.cases import store
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="filters of packets are Linux's")


def outer_address() -> str:
    """The address by which others would reach this machine; "" for a machine without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return ""
        own = str(probe.getsockname()[0])
    return "" if own.startswith("127.") else own


def test_a_port_that_is_confined_answers_the_machine_itself_alone() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        hosts = [host for host in ("127.0.0.1", outer_address()) if host]
        for host in hosts:
            socket.create_connection((host, port), timeout=5).close()
        assert confine_to_loopback(port)
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(b"hello")
        for host in hosts[1:]:
            with pytest.raises(TimeoutError):
                socket.create_connection((host, port), timeout=0.2)
    assert not confine_to_loopback(port)


@pytest.mark.distributed
def test_ranks_of_one_machine_are_closed_to_the_network() -> None:
    server, other = run_ranks(store.open_ports, 2)
    assert server == {"0.0.0.0": 5} and other == {}

"""Ranks that call before Paddle waits for them: threads on loopback."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from erniekit.distributed.rank import RankLostError, RankTimeoutError
from erniekit.distributed.roll_call import wait_for_all_ranks
from erniekit.launch.local import free_port


def call(ranks: list[int], world_size: int, timeout: float = 10.0) -> tuple[list[Future], int]:
    port = free_port("127.0.0.1")
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [pool.submit(wait_for_all_ranks, rank, world_size, ("127.0.0.1", port), timeout) for rank in ranks], port


def test_all_go_on_when_all_have_come_and_the_port_is_free_again() -> None:
    futures, port = call([2, 0, 1], 3)
    assert [future.result() for future in futures] == [None] * 3
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_those_who_do_not_come_are_named() -> None:
    futures, _ = call([0, 2], 4, timeout=0.5)
    error = futures[0].exception()
    assert isinstance(error, RankTimeoutError) and "ranks [1, 3] did not join within 0.5 s" in str(error)
    assert isinstance(futures[1].exception(), RankLostError)  # of rank 0, which has named them


def test_rank_0_names_the_missing_however_late_it_came() -> None:
    port = free_port("127.0.0.1")
    come = threading.Event()

    def late() -> None:
        come.wait()
        wait_for_all_ranks(0, 3, ("127.0.0.1", port), 0.4)

    with ThreadPoolExecutor(2) as pool:
        first, other = pool.submit(late), pool.submit(wait_for_all_ranks, 2, 3, ("127.0.0.1", port), 0.6)
        time.sleep(0.3)  # the other's own time would be over before that of rank 0
        come.set()
    assert isinstance(first.exception(), RankTimeoutError) and "ranks [1] did not join" in str(first.exception())
    assert isinstance(other.exception(), RankLostError)


@pytest.mark.slow
def test_a_rank_0_that_hangs_later_is_noticed() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(RankTimeoutError, match="not all ranks joined"),
    ):
        wait_for_all_ranks(1, 2, silent.getsockname(), 0.1)


def test_rank_0_that_does_not_come_is_named() -> None:
    (future,), port = call([1], 2, timeout=0.3)
    error = future.exception()
    assert isinstance(error, RankTimeoutError) and f"rank 0 did not open 127.0.0.1:{port}" in str(error)


def test_a_stranger_does_not_count() -> None:
    port = free_port("127.0.0.1")

    def unknown_peer_then_rank() -> None:
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    connection.sendall(b"GET / HTTP/1.1\r\n")
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
        wait_for_all_ranks(1, 2, ("127.0.0.1", port), 10)

    thread = threading.Thread(target=unknown_peer_then_rank)
    thread.start()
    wait_for_all_ranks(0, 2, ("127.0.0.1", port), 10)
    thread.join()


def test_waiting_ends_with_rank_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=lambda: server.accept()[0].close())
        thread.start()
        with pytest.raises(RankLostError, match="rank 0 has ended"):
            wait_for_all_ranks(1, 2, server.getsockname(), 10)
        thread.join()

"""What ranks make sure of before Paddle connects them; here ranks are threads."""

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import paddle
import pytest

from ppdist.common.errors import LaunchError
from ppdist.distributed import store
from ppdist.distributed.store import require_connectivity, set_timeout, wait_for_store
from tests.errors import raises

A, B = "127.0.0.2", "127.0.0.3"


class Ranks:
    """As many threads as ranks; what each ended with."""

    def __init__(self, count: int) -> None:
        self.given: list[Any] = [None] * count
        self.barrier = threading.Barrier(count, timeout=20)
        self.said = [""] * count

    def run(self, addresses_W: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        threads = [
            threading.Thread(target=self.be, args=(rank, addresses_W, environment))
            for rank in range(len(addresses_W))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return self.said

    def be(self, rank: int, addresses_W: Sequence[str], environment: Mapping[str, str]) -> None:
        try:
            require_connectivity(self.exchange(rank), addresses_W, rank, environment)
        except LaunchError as error:
            self.said[rank] = str(error)

    def exchange(self, rank: int) -> Callable[[Any], list[Any]]:
        def exchange(value: Any) -> list[Any]:
            self.given[rank] = value
            self.barrier.wait()
            given = list(self.given)
            self.barrier.wait()
            return given

        return exchange


def test_hosts_that_reach_one_another_go_on() -> None:
    assert Ranks(4).run([A, A, B, B], {}) == [""] * 4
    assert Ranks(1).run([A], {}) == [""]


def test_a_way_that_is_closed_is_named_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.create_connection

    def through_a_firewall(target: tuple[str, int], timeout: float) -> socket.socket:
        if target[0] == B:
            raise TimeoutError("timed out")
        return connect(target, timeout)

    monkeypatch.setattr(socket, "create_connection", through_a_firewall)
    said = Ranks(3).run([A, A, B], {"GLOO_SOCKET_IFNAME": "eth7"})
    assert len(set(said)) == 1 and f"{A} -> {B} (port" in said[0]
    assert f"{B} -> {A}" not in said[0]
    assert "timed out" in said[0] and "firewall" in said[0]
    assert "GLOO_SOCKET_IFNAME=eth7, NCCL_SOCKET_IFNAME=not set" in said[0]
    other = {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "ib"}
    assert Ranks(2).run([A, B], other) == [""] * 2  # NCCL goes another way, which this cannot try
    assert Ranks(2).run([A, B], {**other, "PADDLE_DISTRI_BACKEND": "gloo"})[0]


def test_a_store_that_cannot_be_reached_is_named_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"127.0.0.1:{closed.getsockname()[1]}"
        wait_for_store(endpoint, "b", 0)
    began = time.monotonic()
    with raises("store_unreachable", "127.0.0.1"):
        wait_for_store(endpoint, "b", 0.3)
    assert time.monotonic() - began < 5


def test_firewalled_store_is_told_from_late_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "_connect", lambda address, port: TimeoutError("timed out"))
    with raises("store_unreachable", "a firewall"):
        wait_for_store("10.0.0.1:6071", "b", 0)


def test_a_store_that_opens_later_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    opened: list[socket.socket] = []
    timer = threading.Timer(0.5, lambda: opened.append(socket.create_server(("127.0.0.1", port))))
    began = time.monotonic()
    timer.start()
    try:
        wait_for_store(f"127.0.0.1:{port}", "b", 20)
        assert time.monotonic() - began >= 0.5
    finally:
        timer.join()
        opened[0].close()


def test_nccl_waits_as_long_as_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_PG_TIMEOUT", "1")  # so that it is as before after the test
    try:
        set_timeout(12.5)
        assert paddle.distributed.ParallelEnv().pg_timeout == 12500
    finally:
        set_timeout(1800.0)

"""Hosts find each other and compare, whichever way they are started."""

import json
import resource
import signal
import socket
import time
from dataclasses import replace

import pytest

from ppdist.common.errors import LaunchError
from ppdist.launch import connection, rendezvous
from ppdist.launch.connection import CUT_OFF, OTHER_PROGRAM, SILENT, Connection
from ppdist.launch.handshake import Handshake, differences, read_handshake
from ppdist.launch.rendezvous import Hub
from tests.errors import raises
from tests.ports import free_port
from tests.unit.launch.hosts import wait_for
from tests.unit.launch.waiting import TRAIN, A, B, C, Host, host

OLD, NAMES = "127.0.0.9", ("pod-0", "pod-1", "pod-2")


def met(*handshakes: Handshake, seconds: float = 8, pause: float = 0.0) -> list[Host]:
    """All of them, started one after another, and ended."""
    hosts = met_at(free_port(), *handshakes, seconds=seconds, pause=pause)
    for each in sorted(hosts, key=lambda each: each.handshake.is_first):  # which leaves last
        each.end()
    return hosts


def met_at(port: int, *handshakes: Handshake, seconds: float = 8, pause: float = 0.0) -> list[Host]:
    """All of them, once they have met."""
    hosts = [Host(handshake, port, seconds) for handshake in handshakes]
    for each in hosts:
        each.start()
        time.sleep(pause)
    for each in hosts:
        each.thread.join(30)
    return hosts


@pytest.mark.parametrize("order", [(A, B, C), (C, B, A)])
def test_hosts_meet_in_whichever_order_they_start(order: tuple[str, ...]) -> None:
    hosts = met(*(host(own, (A, B, C)) for own in order), pause=0.1)
    assert [each.error for each in hosts] == ["", "", ""]
    assert all(each.channel is not None for each in hosts)
    assert all(any("all 3 hosts" in line for line in each.said) for each in hosts)


@pytest.mark.slow
def test_late_host_awaited_and_named_on_every_host(monkeypatch) -> None:
    monkeypatch.setattr(rendezvous, "_REPORT_SECONDS", 0.5)
    hosts = met(host(A, (A, B, C)), host(B, (A, B, C)), host(C, (A, B, C)), pause=1.2)
    assert [each.error for each in hosts] == ["", "", ""]
    said = "\n".join(hosts[0].said)
    assert "still waiting for " in said and ": 127.0.0.3, 127.0.0.4 (" in said
    assert any(
        line.startswith("host 127.0.0.2: ") and ": 127.0.0.4 (" in line for line in hosts[1].said
    )


def test_many_missing_hosts_are_one_short_line() -> None:
    hosts = tuple(f"127.0.3.{each}" for each in range(1, 101))
    (first,) = met(host(hosts[0], hosts), seconds=0.7)
    assert "127.0.3.4 and 96 more" in first.error
    assert len(first.error) < 400


def test_fewer_files_than_hosts_are_one_message(monkeypatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, 100))
    with raises("open_files_limit", "100 files"):
        Hub(host(A, (A, B)), free_port(), print)


def test_missing_host_named_after_start_timeout() -> None:
    hosts = met(host(A, (A, B, C)), host(B, (A, B, C)), seconds=0.7)
    for each in hosts:
        assert each.code == "hosts_missing" and ": 127.0.0.4 (" in each.error


@pytest.mark.parametrize("stopped", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_before_a_restart_a_signal_ends_all_waiting(stopped: int) -> None:
    port, all_hosts = free_port(), (A, B, C, "127.0.0.5")  # which does not come
    hosts = [Host(host(own, all_hosts, attempt=1), port, 60) for own in (A, B, C)]
    for each in hosts:
        each.start()
    hub = hosts[0].hub
    assert hub is not None
    wait_for(lambda: len(hub.waiting()) == 2)
    hosts[stopped].received.append(signal.SIGTERM)
    for each in hosts:
        each.end()
    assert [each.error for each in hosts] == ["stopped"] * 3


@pytest.mark.parametrize("again", [A, B])
def test_at_the_start_others_wait_for_a_command_typed_anew(again: str) -> None:
    port = free_port()
    hosts = [Host(host(own), port) for own in (A if again == B else B, again, again)]
    hosts[1].received.append(signal.SIGINT)
    for each in hosts:
        each.start()
        time.sleep(0.3)
        if each.received:
            each.end()
    for each in sorted(hosts, key=lambda each: each.handshake.is_first):
        each.end()
    assert [each.error for each in hosts] == ["", "stopped", ""]


@pytest.mark.parametrize("wrong", [(B, A, C), (C, B, A)], ids=["calls another", "is hub itself"])
def test_a_host_that_begins_ips_with_another_ends_at_once(wrong: tuple[str, ...]) -> None:
    port = free_port()
    second, third = Host(host(B, (A, B, C)), port), Host(host(C, wrong), port)
    for each in (second, third):
        each.start()
    third.end()
    assert third.code == "hosts_differ" and f"{A},{B},{C}" in third.error
    second.received.append(signal.SIGINT)  # it goes on waiting for the right command
    second.end()
    assert second.error == "stopped" and "--ips: " in "".join(second.said)


def test_another_order_on_one_host_reaches_all() -> None:
    hosts = met(host(A, (A, B, C)), host(B, (A, B, C)), host(C, (A, C, B)), pause=0.3)
    assert all("127.0.0.2,127.0.0.4,127.0.0.3" in each.error for each in hosts)


@pytest.mark.slow
def test_a_host_not_in_the_list_is_refused() -> None:
    first, stranger = met(host(A, (A, B)), host(C, (A, C)), seconds=2)
    assert all(each in stranger.error for each in ("127.0.0.2 refused", "127.0.0.4", "--ips"))
    assert any(line.startswith("rejected 127.0.0.4: ") for line in first.said)
    assert ": 127.0.0.3 (" in first.error


def test_a_second_fleetrun_for_one_host_waits_and_says_so() -> None:
    port = free_port()
    running = met_at(port, host(A), host(B))
    hub = running[0].hub
    assert hub is not None
    late = Host(host(B), port, seconds=2)
    late.start()
    while late.thread.is_alive():
        hub.watch()
        time.sleep(0.05)
    for each in reversed(running):
        each.end()
    assert late.code == "hosts_missing" and "another fleetrun" in late.error


@pytest.mark.parametrize(
    ("speaks", "says"),
    [
        pytest.param(b"", SILENT, marks=pytest.mark.slow),
        (b"220 ESMTP\r\n", OTHER_PROGRAM),
        (b"ppdist " + 32 * b"0" + b"\n", CUT_OFF),  # what follows is lost on the way
    ],
)
def test_who_answers_wrongly_or_no_more_is_told_apart(speaks, says, monkeypatch) -> None:
    monkeypatch.setattr(rendezvous, "_HANDSHAKE_SECONDS", 0.5)
    with socket.create_server((A, 0)) as server:
        waiting = Host(host(B), server.getsockname()[1], seconds=1)
        waiting.start()
        caller, _ = server.accept()
        caller.sendall(speaks)
        waiting.end()
        caller.close()
    assert says in waiting.error


def test_no_way_to_the_hub_is_said() -> None:
    (waiting,) = met(host(B, ("240.0.0.1", B)), seconds=0.5)
    assert waiting.code == "hosts_missing" and "no route to host" in waiting.error


def test_a_port_that_is_taken_is_said_on_the_first_host() -> None:
    with socket.create_server((A, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} is in use on this machine"):
            Hub(host(A), port, print)


def test_a_name_that_means_another_address_at_the_hub_does() -> None:
    """A pod came back: the hub still has its old address, and learns the new one from it."""
    views = {A: (A, OLD, C), B: (A, B, C), C: (A, B, C)}
    hosts = met(*(host(own, view, names=NAMES) for own, view in views.items()))
    assert [each.error for each in hosts] == ["", "", ""]
    assert {each.channel.hosts for each in hosts if each.channel} == {(A, B, C)}


def test_an_old_address_in_another_run_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_LOOK_UP_SECONDS", 0.2)
    port = free_port()
    other = Host(host(OLD, (OLD, "127.0.0.10"), names=("other-0", "other-1")), port, 60)
    hosts = [Host(host(A, names=NAMES[:2]), port), Host(host(B, (OLD, B)), port)]
    hosts[1].handshake = replace(hosts[1].handshake, names=NAMES[:2])
    hosts[1].resolve = lambda name: A if was_rejected() else OLD

    def was_rejected() -> bool:
        return any(line.startswith(f"rejected {B}: ") for line in other.said)

    for each in (other, *hosts):
        each.start()
    for each in (hosts[1], hosts[0]):
        each.end()
    other.received.append(signal.SIGINT)  # the other run goes on waiting for its own host
    other.end()
    assert [each.error for each in (*hosts, other)] == ["", "", "stopped"]
    assert was_rejected()


def test_noise_on_first_host_port_is_harmless() -> None:
    port = free_port()
    first, second = Host(host(A), port), Host(host(B), port)
    first.start()
    callers = []
    for noise in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 500_000,
        b"[" * 100_000 + b"\n",
        b"\xff\n",
        b"",
    ):
        callers.append(socket.create_connection((A, port)))
        callers[-1].settimeout(5)
        try:
            callers[-1].sendall(noise)
        except OSError:
            assert len(noise) > 100_000  # refused before all of it was read
    second.start()
    first.thread.join(20)
    second.end()
    first.end()
    assert (first.error, second.error) == ("", "")
    for caller in callers:
        caller.close()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"processes": 4}, f"processes on a host: {A} has 2, {B} has 4; ranks are numbered by it"),
        ({"device": "gpu"}, f"device: {A} has cpu, {B} has gpu"),
        ({"script": "tools/eval.py"}, f"script: {A} has train.py, {B} has eval.py"),
        ({"arguments": ("-c", "b.yml", "-o", "seed=1")}, f"{A} has cfg.yml, {B} has b.yml"),
        ({"arguments": ("-c", "cfg.yml", "-o", "seed=2")}, f"{A} has seed=1, {B} has seed=2"),
        ({"arguments": ("-c", "cfg.yml", "--resume", "-o", "seed=1")}, f"{B} has --resume"),
        ({"arguments": ()}, f"{A} has -c cfg.yml -o seed=1, {B} has none"),
        ({"ppdist": "0.2.0"}, f"ppdist: {A} has 0.1.0, {B} has 0.2.0; install the same version"),
        ({"paddle": "3.2.2"}, f"paddle: {A} has 3.3.1, {B} has 3.2.2"),
    ],
)
def test_what_must_agree_is_named_with_both_sides(change: dict, says: str) -> None:
    found = differences(TRAIN, replace(TRAIN, host=B, **change))
    assert len(found) == 1 and says in found[0]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"script": "/opt/ppdist/tools/train.py"},
        {"arguments": ("-c", "/home/b/cfg.yml", "-o", "seed=1")},
        {"arguments": ("-c", "cfg.yml", "-o", "seed=1", "data.root=/mnt/coco")},
        {"arguments": ("-c", "cfg.yml", "-o", "seed=1", "model.pretrained=/b/w.pdparams")},
    ],
)
def test_what_may_differ_between_hosts_is_let_through(change: dict) -> None:
    other = replace(TRAIN, host=B, **change)
    assert differences(TRAIN, other) == []


def test_per_host_keys_may_be_on_one_host_alone() -> None:
    plain = replace(TRAIN, arguments=("-c", "cfg.yml", "--eval"))
    own = replace(plain, host=B, arguments=("-c", "cfg.yml", "-o", "output_dir=/b", "--eval"))
    assert differences(plain, own) == []


@pytest.mark.parametrize(
    "change",
    [
        {"type": "go"},
        {"hosts": "127.0.0.2"},
        {"hosts": [B]},
        {"arguments": [1]},
        {"arguments": ["x"] * 5000},
        {"processes": True},
        {"processes": 10**9},
        {"names": ["a"]},
    ],
)
def test_what_is_no_handshake_is_not_taken_for_one(change: dict) -> None:
    message = json.loads(json.dumps(TRAIN.message()))
    assert read_handshake(message) == TRAIN
    assert read_handshake(message | change) is None


def test_unresponsive_host_error_says_what_to_check(monkeypatch) -> None:
    monkeypatch.setattr(connection, "_CONNECT_SECONDS", 0.3)
    with socket.create_server((A, 0), backlog=0) as server:
        address = server.getsockname()
        filling = [socket.socket() for _ in range(3)]  # nobody takes these calls
        for each in filling:
            each.setblocking(False)
            each.connect_ex(address)
        call = Connection.call(*address)
        while call.closed is None and time.monotonic() - call.opened < 5:
            call.receive()
            time.sleep(0.05)
        for each in filling:
            each.close()
    assert call.closed and call.closed.startswith("no answer")


def test_a_call_of_another_run_is_no_difference() -> None:
    """Its hub may have an address of a pod that is gone."""
    port = free_port()
    second, other = Host(host(B, (A, B)), port), Host(host(C, (C, B)), port, seconds=1.5)
    for each in (second, other):
        each.start()
    other.end()
    assert other.code == "hosts_missing"
    second.received.append(signal.SIGINT)
    second.end()

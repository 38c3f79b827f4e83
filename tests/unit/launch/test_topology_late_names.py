"""Hosts whose names are known only once they run, or have other addresses when they come back."""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ppdist.common.errors import LaunchError
from ppdist.launch import job as front
from ppdist.launch import rendezvous, topology
from ppdist.launch.job import fleetrun
from ppdist.launch.rendezvous import ControlChannel, Handshake
from ppdist.launch.topology import Machine, Network, once_known, own_address, resolve_hosts
from ppdist.launch.watchdog import Outcome, Stopped
from tests.ports import free_port
from tests.unit.launch import namespaces as netns
from tests.unit.launch.hosts import (
    ALL_REDUCE,
    WAITS_FOR_A_RESTART,
    WAITS_FOR_ALL,
    hosts_of_a_test,
    wait_for,
    write,
)
from tests.unit.launch.namespaces import Cable
from tests.unit.launch.waiting import Host, host

A, B, C, OLD = "127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.9"
NAMES = ("pod-0", "pod-1")


class Names(Network):
    """What names mean at each question; the last meaning stays."""

    def __init__(self, **meanings: list[str | None]) -> None:
        self.meanings = {name.replace("_", "-"): list(each) for name, each in meanings.items()}

    def resolve(self, name: str) -> str | None:
        if name[0].isdigit():
            return name
        each = self.meanings.get(name, [None])
        return each.pop(0) if len(each) > 1 else each[0]


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(rendezvous, "_LOOK_SECONDS", 0.2)


def waited(ips: str, own: str | None, network: Network, seconds: float = 5.0) -> list[str]:
    said: list[str] = []

    def look() -> None:
        addresses = resolve_hosts(ips, network)
        if own is not None:
            own_address(addresses, own, network)

    once_known(look, ips, network, seconds, said.append, [])
    return said


def test_a_name_is_waited_for_and_that_is_said_at_once() -> None:
    (said,) = waited("pod-0,pod-1", None, Names(pod_0=[A], pod_1=[None, None, B]))
    assert said == (
        "--ips: the name pod-1 is not known on this machine; give its IPv4 address, or add it to "
        "/etc/hosts on every host; waiting for that to change (0 s)"
    )


def test_an_old_name_is_waited_for() -> None:
    said = waited("pod-0,pod-1", B, Names(pod_0=[A], pod_1=[OLD, OLD, B]))
    assert said and said[0].startswith(f"--host {B} is not among --ips {A}, {OLD}")


def test_name_never_resolved_is_error_in_the_end() -> None:
    with pytest.raises(LaunchError, match=r"pod-1 is not known.*waited 0.05 s: --start_timeout"):
        waited("pod-0,pod-1", None, Names(pod_0=[A]), 0.05)


@pytest.mark.parametrize("own", [OLD, None])
def test_addresses_are_not_waited_for(own: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology.time, "sleep", None)
    if own is None:
        assert waited(f"{A},{B}", None, Names()) == []
    else:
        with pytest.raises(LaunchError, match="is not among"):
            waited(f"{A},{B}", own, Names())


def test_two_names_of_one_address_are_waited_for() -> None:
    """A pod has the address that another one had, whose name is still known by it."""
    said = waited("pod-0,pod-1", B, Names(pod_0=[B, B, A], pod_1=[B]))
    assert said and said[0].startswith(f"--ips: pod-1 and pod-0 are both {B}")
    with pytest.raises(LaunchError, match=f"pod-0 and pod-0 are both {A}"):
        waited("pod-0,pod-0", None, Names(pod_0=[A]), 60)


def started(monkeypatch, tmp_path, network: Network, received: Sequence[int] = ()) -> int:
    """fleetrun with two pods' names, which starts nothing."""
    (tmp_path / "t.py").write_text("")
    monkeypatch.chdir(tmp_path)

    def nothing(*words: object) -> Outcome:
        raise AssertionError("started")

    machine = Machine([], "cpu", 2, network)
    words = ["--ips", "pod-0,pod-1", "--host", A, "--start_timeout", "20", "t.py"]
    return fleetrun(words, {}, lambda: machine, nothing, list(received))


def test_a_signal_ends_the_waiting_with_75(tmp_path, monkeypatch, capfd) -> None:
    assert started(monkeypatch, tmp_path, Names(), [signal.SIGTERM]) == 75
    assert "stopped by SIGTERM before any rank of this attempt began" in capfd.readouterr().err


def test_each_rendezvous_has_its_whole_time(tmp_path, monkeypatch) -> None:
    met: list[tuple[tuple[str, ...], float]] = []

    def meet(mine: Handshake, port: int, seconds: float, *words: object) -> ControlChannel:
        met.append((mine.hosts, seconds))
        raise rendezvous.Moved if len(met) < 3 else Stopped

    monkeypatch.setattr(front, "rendezvous", meet)
    network = Names(pod_0=[A], pod_1=[None, None, OLD, None, OLD, A, None, B])
    assert started(monkeypatch, tmp_path, network) == 75
    assert met == [((A, OLD), 20), ((A, OLD), 20), ((A, B), 20)]


class Mover(Host):
    """One that looks its names up again, as fleetrun does."""

    views: list[tuple[str, ...]]  # the addresses of all hosts, first and later

    def _meet(self) -> None:
        while True:
            mine = replace(self.handshake, hosts=self.views[0])
            try:
                self.channel = rendezvous.rendezvous(
                    mine, self.port, self.seconds, self.said.append, look=self._look
                )
            except rendezvous.Moved:
                self.views.pop(0)
                continue
            except LaunchError as error:
                self.error = str(error)
            return

    def _look(self) -> tuple[str | None, ...]:
        return self.views[min(1, len(self.views) - 1)]


def meet_all(
    views: dict[str, list[tuple[str, ...]]],
    typed: tuple[str, ...],
    seconds: float = 10,
    port: int | None = None,
) -> list[Mover]:
    """Hosts by their own address, with what they think where all are."""
    port = port or free_port()
    movers = []
    for own, each in views.items():
        handshake: Handshake = host(own, each[-1], names=typed)
        movers.append(Mover(handshake, port, seconds))
        movers[-1].views = list(each)
        movers[-1].start()
    for mover in movers:
        mover.thread.join(30)
    for mover in sorted(movers, key=lambda each: each.handshake.is_first):
        mover.end()
    return movers


@pytest.mark.parametrize("own", [A, B])
def test_host_with_stale_address_finds_new_one(own: str) -> None:
    """One of two pods came back; the other, the first or the second, still has its old address."""
    views = {each: [(A, B)] for each in (A, B)}
    views[own].insert(0, (A, OLD) if own == A else (OLD, B))
    movers = meet_all(views, NAMES)
    assert [mover.error for mover in movers] == ["", ""], [mover.said for mover in movers]
    assert all(mover.channel is not None for mover in movers)


@pytest.mark.slow
def test_hosts_disagreeing_on_third_resolve_again() -> None:
    old, new = (A, B, OLD), (A, B, C)
    movers = meet_all({A: [old, new], B: [old, new], C: [new]}, (*NAMES, "pod-2"))
    assert [mover.error for mover in movers] == ["", "", ""], [mover.said for mover in movers]


@pytest.mark.slow
def test_names_in_lasting_dispute_end_on_both_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "_DISPUTE_SECONDS", 1.0)
    began = time.monotonic()
    movers = meet_all({A: [(A, B, C)], B: [(A, B, OLD)]}, (*NAMES, "pod-2"), seconds=60)
    assert time.monotonic() - began < 30
    for mover in movers:
        assert f"{A},{B},{C}" in mover.error and f"{A},{B},{OLD}" in mover.error, mover.said
        assert "pod-0,pod-1,pod-2 must mean the same everywhere" in mover.error


def test_a_name_unknown_for_a_moment_is_no_dispute() -> None:
    dispute = rendezvous.Dispute()
    dispute.hear("elsewhere")
    dispute._since -= 61
    assert dispute.lasts((A, None)) == "" == dispute.lasts((A, B))
    dispute._since -= 61
    assert dispute.lasts((A, B)) == "elsewhere (for 61 s)"
    dispute._heard -= 11  # the other one is gone, or has learnt better
    assert dispute.lasts((A, B)) == ""


@pytest.mark.slow
def test_an_old_address_in_another_run_ends_nothing() -> None:
    port = free_port()
    other = Host(host(OLD, (OLD, "127.0.0.10"), names=("other-0", "other-1")), port, 6)
    other.start()
    movers = meet_all({A: [(A, OLD), (A, B)], B: [(A, B)]}, NAMES, port=port)
    other.end()
    assert [mover.error for mover in movers] == ["", ""], [mover.said for mover in movers]
    assert any(line.startswith(f"refused {A}, which has called") for line in other.said)


@pytest.mark.slow
def test_a_resolver_that_does_not_answer_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    class Slow(Network):
        def resolve(self, name: str) -> str | None:
            asked.wait(30)
            return name

    lookout = rendezvous.Lookout([A, B], Slow())
    began = time.monotonic()
    assert lookout.look() is None and lookout.look() is None
    assert time.monotonic() - began < 10
    asked.set()
    found = None
    while found is None:
        found = lookout.look()
    assert found == (A, B)


def test_other_hosts_are_still_an_error_at_once() -> None:
    port = free_port()
    first = Host(host(A, (A, B), names=NAMES), port)
    second = Host(host(B, (A, B, C), names=(*NAMES, "pod-2")), port)
    for each in (second, first):
        each.start()
    for each in (second, first):
        each.end()
    assert "type the same hosts in the same order everywhere" in first.error + second.error


@pytest.fixture
def hosts_files(cable: Cable) -> Iterator[list[Path]]:
    """What /etc/hosts is in each of the two namespaces."""
    files = [Path("/etc/netns", name, "hosts") for name in cable.namespaces]
    for file in files:
        file.parent.mkdir(parents=True)
    yield files
    for file in files:
        file.unlink(missing_ok=True)
        file.parent.rmdir()


@pytest.mark.slow
def test_a_pod_with_a_new_address_joins_the_next_attempt(
    cable: Cable, hosts_files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names that are known late, and for some seconds are those of a pod that is gone."""
    monkeypatch.chdir(tmp_path)
    first_address, second_address, new_address = netns.A, netns.B, "10.213.7.3"
    both = f"{first_address} pod-0\n{second_address} pod-1\n"
    hosts_files[0].write_text(f"{first_address} pod-0\n")
    hosts_files[1].write_text(both)
    words = ("--ips", "pod-0,pod-1", "--max_restart", "2")
    words += (write(WAITS_FOR_ALL + WAITS_FOR_A_RESTART + ALL_REDUCE),)
    with hosts_of_a_test() as start:
        enter = {address: cable.prefix(address) for address in (first_address, second_address)}
        first = start("0", *words, prefix=enter[netns.A], variables={"POD_IP": first_address})
        wait_for(lambda: "the name pod-1 is not known" in first.said)
        hosts_files[0].write_text(both)
        second = start("1", *words, prefix=enter[netns.B], variables={"POD_IP": second_address})
        wait_for(lambda: Path("ready0").exists() and Path("ready1").exists())
        second.process.send_signal(signal.SIGKILL)
        for verb, address in (("del", second_address), ("add", new_address)):
            place = ("-n", cable.namespaces[1])
            netns.ip(*place, "address", verb, f"{address}/24", "dev", "cable1")
        now = f"{first_address} pod-0\n{new_address} pod-1\n"
        hosts_files[1].write_text(now)
        again = start("2", *words, prefix=enter[netns.B], variables={"POD_IP": new_address})
        wait_for(lambda: "restart 1 of 2" in first.said)
        time.sleep(8)
        hosts_files[0].write_text(now)
        ended = [each.ended() for each in (first, again)]
    assert [each.code for each in ended] == [0, 0], ended
    assert ended[0].output == "sum 3.0 on rank 0 of 2\n"
    assert "names of --ips have other addresses than before" in ended[0].errors

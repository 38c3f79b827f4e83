"""The channel between the hosts of a run; each host is a thread with one end of it."""

import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from ppdist.common.process import boot_seconds
from ppdist.launch.connection import Connection
from ppdist.launch.control_channel import ControlChannel, HostEnd, verdict
from ppdist.launch.outcome import Outcome
from tests.unit.launch.hosts import wait_for
from tests.unit.launch.sockets import socket_pair

A, B, C = "10.9.0.1", "10.9.0.2", "10.9.0.3"
GLOO = "rank 0 failed first: it ended with exit code 1\ngloo/transport/tcp/pair.cc TIMEOUT"


class Host:
    """A host whose ranks end as `end` says, or stop when the others want it."""

    def __init__(
        self, own: str, channel: ControlChannel, end: Callable[[bool], Outcome | None]
    ) -> None:
        self.own, self.channel, self.end = own, channel, end
        self.received: list[int] = []
        self.outcome: Outcome | None = None
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        outcome = None
        while outcome is None:
            must_stop = self.channel.watch(self.received)
            outcome = self.end(must_stop or bool(self.received))
            time.sleep(0.02)
        self.outcome = self.channel.finish(outcome, self.received)


class Taking:
    """A hub that has just taken in a host."""

    def __init__(self, newcomer: str) -> None:
        self.newcomer, self.turned_away = newcomer, ()

    def watch(self) -> None:
        pass

    def newcomers(self) -> list[str]:
        return [self.newcomer]

    def end_world(self, lost, left, turned_away=()) -> None:
        self.turned_away = tuple(turned_away)


def channels(
    hosts: Sequence[str], silence: float = 60.0, hub: Taking | None = None
) -> tuple[dict[str, ControlChannel], dict[str, list]]:
    said: dict[str, list[str]] = {host: [] for host in hosts}
    near, far = {}, {}
    for host in hosts[1:]:
        one, other = socket_pair()
        near[host], far[host] = Connection(one), Connection(other, calls=True)
    elastic = {"is_elastic": hub is not None}
    first = ControlChannel(
        hosts[0], hosts, near, said[hosts[0]].append, silence, hub=hub, **elastic
    )
    made = {hosts[0]: first}
    for host, connection in far.items():
        peers = {hosts[0]: connection}
        made[host] = ControlChannel(host, hosts, peers, said[host].append, silence, **elastic)
    return made, said


def ran(ends: dict[str, Callable[[bool], Outcome | None]]) -> tuple[dict[str, Host], dict]:
    made, said = channels(list(ends))
    hosts = {own: Host(own, channel, ends[own]) for own, channel in made.items()}
    join(hosts)
    return hosts, said


def join(hosts: dict[str, Host]) -> None:
    for host in hosts.values():
        host.thread.join(20)
        assert not host.thread.is_alive(), f"{host.own} hangs"


def done(must_stop: bool) -> Outcome | None:
    return Outcome(0, "")


def killed_when_asked(must_stop: bool) -> Outcome | None:
    """A rank that hangs in a collective until it is killed."""
    said = "rank 0 failed first: it was killed by SIGTERM"
    return (
        Outcome(1, said, remote_message=said, is_consequence=True, time=boot_seconds())
        if must_stop
        else None
    )


def test_all_hosts_wait_for_all() -> None:
    ready = time.monotonic() + 0.5
    ends = {A: done, B: lambda stop: Outcome(0, "") if time.monotonic() > ready else None}
    hosts, said = ran(ends)
    assert [host.outcome for host in hosts.values()] == [Outcome(0, "")] * 2
    assert said == {A: [], B: []} and time.monotonic() > ready


@pytest.mark.parametrize("culprit", [A, B, C])
def test_one_host_failure_stops_and_is_named_on_all(culprit: str) -> None:
    failed = Outcome(
        1, "rank 3 failed first: boom; above", remote_message="rank 3 failed first: boom"
    )
    ends = {host: killed_when_asked for host in (A, B, C)}
    ends[culprit] = lambda stop: failed
    hosts, said = ran(ends)
    for own, host in hosts.items():
        assert host.outcome is not None and host.outcome.code == 1
        if own == culprit:
            assert host.outcome.message == failed.message
        else:
            assert host.outcome.message == f"host {culprit}: {failed.remote_message}"
            assert [line.startswith(host.outcome.message) for line in said[own]] == [True]


def test_the_cause_wins_over_an_earlier_report() -> None:
    now = boot_seconds()
    lost = Outcome(1, GLOO, remote_message=GLOO, is_consequence=True, time=now)
    cause = Outcome(1, "rank 1: SIGSEGV", remote_message="rank 1: SIGSEGV", time=now - 0.1)
    late = time.monotonic() + 0.4
    hosts, _ = ran(
        {A: lambda stop: lost, B: lambda stop: cause if time.monotonic() > late else None}
    )
    assert hosts[A].outcome == Outcome(1, f"host {B}: rank 1: SIGSEGV")
    assert hosts[B].outcome == Outcome(1, "rank 1: SIGSEGV")


def test_wrong_input_on_one_host_is_exit_2_on_all() -> None:
    wrong = Outcome(2, "error: a.json: no images", remote_message="error: a.json: no images")
    hosts, _ = ran({A: killed_when_asked, B: lambda stop: wrong})
    assert hosts[A].outcome == Outcome(2, f"host {B}: {wrong.remote_message}")
    assert hosts[B].outcome == wrong


def test_the_same_wrong_input_is_said_by_each_host() -> None:
    wrong = Outcome(2, "error: unknown key", remote_message="error: unknown key")
    hosts, _ = ran({A: lambda stop: wrong, B: lambda stop: wrong})
    assert [host.outcome for host in hosts.values()] == [wrong, wrong]


@pytest.mark.parametrize("known", [True, False])
def test_others_hear_whether_a_host_knows_the_cause(known: bool) -> None:
    failed = Outcome(1, "x", remote_message="x", is_consequence=not known)
    made, _ = channels([A, B, C])
    made[B].tell_failure(failed)
    deadline = time.monotonic() + 10
    while not all([made[A].watch([]), made[C].watch([])]) and time.monotonic() < deadline:
        made[B].watch([])
        time.sleep(0.02)
    assert [made[host].cause_known for host in (A, B, C)] == [known] * 3
    assert not made[B].watch([])  # its own failure is no news to it


@pytest.mark.parametrize("stopped", [A, B, C])
def test_a_signal_on_one_host_stops_all_cleanly(stopped: str) -> None:
    made, said = channels([A, B, C])
    save = Outcome(75, "")
    hosts = {
        own: Host(own, channel, lambda stop: save if stop else None)
        for own, channel in made.items()
    }
    time.sleep(0.2)
    hosts[stopped].received.append(signal.SIGTERM)
    join(hosts)
    for own, host in hosts.items():
        assert host.outcome is not None and host.outcome.code == 75
        assert (host.channel.stopped_by == signal.SIGTERM) == (own != stopped)
        if own != stopped:
            assert said[own][0].startswith(f"host {stopped}: got SIGTERM")


@pytest.mark.parametrize("where", [A, B, C])
@pytest.mark.parametrize("late", [False, True], ids=["ranks run", "ranks have ended"])
def test_a_second_interrupt_is_one_code_on_all_hosts(where: str, late: bool) -> None:
    made, _ = channels([A, B, C])

    def end_of(own: str) -> Callable[[bool], Outcome | None]:
        def end(must_stop: bool) -> Outcome | None:
            twice = len(signals) == 2
            if own != where:  # saves until it has lost its peer
                return killed_when_asked(must_stop and twice)
            if late:  # the second comes while it waits for the others
                return killed_when_asked(bool(signals))
            said = "SIGINT again"
            killed = Outcome(130, said, signal.SIGINT, said, True, time=boot_seconds())
            return killed if twice else None

        return end

    signals: list[int] = []
    hosts = {own: Host(own, channel, end_of(own)) for own, channel in made.items()}
    hosts[where].received = signals
    for _ in range(2):
        signals.append(signal.SIGINT)
        time.sleep(0.2)
    join(hosts)
    outcomes = [host.outcome for host in hosts.values() if host.outcome is not None]
    assert {outcome.code for outcome in outcomes} == ({1} if late else {130})
    assert len(outcomes) == 3


@pytest.mark.parametrize("gone", [A, B])
def test_host_without_fleetrun_ends_others_by_name(gone: str) -> None:
    made, _ = channels([A, B, C])
    hosts = {own: Host(own, made[own], killed_when_asked) for own in (A, B, C) if own != gone}
    made[gone].close()
    join(hosts)
    for host in hosts.values():
        assert host.outcome is not None and host.outcome.code == 1
        assert host.outcome.message.startswith(f"host {gone}: connection lost")


@pytest.mark.parametrize("silent", [A, B])
def test_a_silent_host_is_lost_though_gloo_failed_first(silent: str) -> None:
    made, _ = channels([A, B], silence=0.6)
    other = B if silent == A else A
    lost = Outcome(1, GLOO, remote_message=GLOO, is_consequence=True, time=boot_seconds())
    hosts = {other: Host(other, made[other], lambda stop: lost)}
    join(hosts)
    assert hosts[other].outcome is not None
    assert hosts[other].outcome.message.startswith(f"host {silent}: no heartbeat")


def test_hosts_that_lost_each_other_name_no_culprit() -> None:
    lost = Outcome(1, GLOO, remote_message=GLOO, is_consequence=True, time=boot_seconds())
    hosts, _ = ran({A: lambda stop: lost, B: lambda stop: lost})
    for host in hosts.values():
        assert host.outcome is not None and host.outcome.code == 1
        assert host.outcome.message.count("Root cause unknown") == 1


def test_the_verdict_prefers_wrong_input_then_the_cause() -> None:
    clean, stopped = HostEnd(A, 0, "", False, 0.0), HostEnd(B, 75, "", False, 0.0)
    early, late = HostEnd(A, 1, "x", False, 1.0), HostEnd(B, 1, "y", False, 2.0)
    wrong = HostEnd(C, 2, "z", False, 3.0)
    echo = HostEnd(C, 2, "rank 0 (host a) failed:", True, 0.5)
    assert verdict([clean, stopped]) == stopped
    assert verdict([clean, late, early]) == early
    assert verdict([late, early, wrong]) == wrong
    assert verdict([late, early, echo]) == early
    guess, lost = HostEnd(A, 1, "g", False, 0.1, is_guess=True), HostEnd(B, 1, "l", True, 0.05)
    assert verdict([late, guess]) == late and verdict([lost, guess]) == guess


@pytest.mark.parametrize(
    "nonsense", [{"type": "ended", "code": -7, "age_ms": "x", "message": 1}, b"nonsense\n"]
)
def test_nonsense_on_the_line_counts_as_a_lost_host(nonsense: dict | bytes) -> None:
    one, other = socket_pair()
    far = Connection(other, calls=True)
    first = ControlChannel(A, (A, B), {B: Connection(one)}, print, 60.0)
    for _ in range(2):  # a greeting each
        first.watch([])
        far.receive()
    if isinstance(nonsense, bytes):
        other.send(nonsense)
    else:
        far.send(nonsense)
    wait_for(lambda: first.watch([]), 10)
    assert first.finish(Outcome(0, ""), []).code == 1


@pytest.mark.parametrize("code", [2, 1])
def test_a_host_taken_in_just_now_that_fails_before_a_step_ends_alone(code: int) -> None:
    hub = Taking(C)
    made, said = channels((A, B, C), hub=hub)
    wrong = Outcome(
        code, "error: images differ", remote_message="error: images differ", made_step=False
    )

    def ends_of(own: str):
        end = replace(wrong, is_consequence=own != C)
        return lambda must_stop: end if must_stop or own == C else None

    hosts = {own: Host(own, channel, ends_of(own)) for own, channel in made.items()}
    join(hosts)
    ends = {own: (host.outcome.code, host.outcome.goes_on) for own, host in hosts.items()}
    assert ends == {A: (1, True), B: (1, True), C: (code, False)}
    assert hosts[C].outcome.is_final
    assert hub.turned_away == (C,)
    assert any(f"goes on without host {C}" in line for line in said[A])

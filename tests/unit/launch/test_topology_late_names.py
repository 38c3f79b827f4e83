"""Hosts whose names are known only once they run, or have other addresses when they come back."""

import signal
from collections.abc import Sequence

import pytest

from ppdist.launch import job as front
from ppdist.launch import network
from ppdist.launch.console import finish
from ppdist.launch.control_channel import ControlChannel
from ppdist.launch.job import fleetrun
from ppdist.launch.network import Network, find_own_address, resolve_hosts, retry_until_known
from ppdist.launch.options import Options
from ppdist.launch.outcome import Outcome
from ppdist.launch.topology import LaunchPlan, Machine
from tests.errors import raises

A, B, OLD = "127.0.0.2", "127.0.0.3", "127.0.0.9"


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
def fast_look_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_LOOK_SECONDS", 0.01)


def waited(ips: str, own: str | None, network: Network, seconds: float = 5.0) -> list[str]:
    said: list[str] = []

    def look() -> None:
        addresses = resolve_hosts(ips, network)
        if own is not None:
            find_own_address(addresses, own, network)

    retry_until_known(look, ips, network, seconds, said.append, [])
    return said


def test_a_name_is_waited_for_and_that_is_said_at_once() -> None:
    (said,) = waited("pod-0,pod-1", None, Names(pod_0=[A], pod_1=[None, None, B]))
    assert said.startswith("--ips: ") and "pod-1" in said and said.endswith("(0 s)")


def test_name_never_resolved_is_error_in_the_end() -> None:
    with raises("ips_not_settled", "pod-1", "0.05"):
        waited("pod-0,pod-1", None, Names(pod_0=[A]), 0.05)


@pytest.mark.parametrize("own", [OLD, None])
def test_addresses_are_not_waited_for(own: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.time, "sleep", None)
    if own is None:
        assert waited(f"{A},{B}", None, Names()) == []
    else:
        with raises("host_not_in_ips"):
            waited(f"{A},{B}", own, Names())


def test_two_names_of_one_address_are_waited_for() -> None:
    """A pod has the address that another one had, whose name is still known by it."""
    said = waited("pod-0,pod-1", B, Names(pod_0=[B, B, A], pod_1=[B]))
    assert said and all(each in said[0] for each in ("pod-1", "pod-0", B))
    with raises("ips_repeated", "pod-0", str(A)):
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
    finish()
    assert "stopped by SIGTERM" in capfd.readouterr().err


def test_ranks_get_the_addresses_that_hosts_say_of_themselves(tmp_path, monkeypatch) -> None:
    """The name of the other one still was that of a pod which is gone."""
    (tmp_path / "t.py").write_text("")
    monkeypatch.chdir(tmp_path)
    channel = ControlChannel(A, (A, B), {}, print)
    monkeypatch.setattr(front, "rendezvous", lambda *words: channel)
    plans: list[LaunchPlan] = []

    def run(options: Options, plan: LaunchPlan, *words: object) -> Outcome:
        plans.append(plan)
        return Outcome(0, "")

    machine = Machine([], "cpu", 2, Names(pod_0=[A], pod_1=[OLD]))
    assert (
        fleetrun(["--ips", "pod-0,pod-1", "--host", A, "t.py"], {}, lambda: machine, run, []) == 0
    )
    assert plans[0].ranks[0]["PADDLE_TRAINER_ENDPOINTS"] == f"{A}:6071,{B}:6071"

"""What the hub of a job does with hosts that come back."""

import json
import sys
from pathlib import Path

import pytest

from ppdist.launch import rendezvous
from ppdist.launch.rendezvous import Hub
from tests.ports import free_port
from tests.unit.launch.hosts import wait_for
from tests.unit.launch.waiting import A, B, C, Host, host

OURS = {"config data.root": "1", "config seed": "2", "data data.train": "3"}
WRITES = "import pathlib, sys; pathlib.Path(sys.argv[2]).write_text(sys.argv[1])"


class Job:
    """An elastic job of three hosts, in which all have trained."""

    def __init__(self, digests: dict[str, str] | None = None, least: int = 1) -> None:
        self.said: list[str] = []
        self.least = least
        self.port, self.hosts = free_port(), (A, B, C)
        self.hub = Hub(self.elastic(A), self.port, self.said.append, digests=lambda: digests)
        self.world = self.meet(A, B, C)

    def elastic(self, own: str, attempt: int = 0):
        options = {"min_hosts": self.least, "rejoin_seconds": 1}
        return host(own, (A, B, C), attempt=attempt, changes=attempt, **options)

    def begin(self, own: str, attempt: int = 0, compare: tuple[str, ...] = ()) -> Host:
        begun = Host(self.elastic(own, attempt), self.port, compare=compare)
        begun.hub = self.hub if own == A else None
        begun.start()
        return begun

    def meet(self, *own: str, attempt: int = 0) -> list[Host]:
        hosts = [self.begin(each, attempt) for each in own]
        for each in hosts:
            each.thread.join(20)
        assert [each.error for each in hosts] == [""] * len(hosts)
        return hosts

    def lose(self, *lost: str, stepped: bool) -> None:
        """The world ends, because fleetruns were killed."""
        for each in self.world:
            for peer in each.channel._peers.values():
                peer.close()
        self.hub.end_world(lost, ())
        self.hub.count_comings(stepped)


def returned(job: Job, digests: object) -> Host:
    """C, that comes back and would train with this, while the others train."""
    job.lose(C, stepped=True)
    job.world = job.meet(A, B, attempt=1)
    words = (sys.executable, "-c", WRITES, json.dumps(digests), "digests.json")
    back = job.begin(C, compare=words)
    wait_for(lambda: job.hub.watch() or back.code != "" or job.hub.waiting() == [C], 20)
    return back


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("digests", [OURS, {"data data.train": "3"}])
def test_a_host_that_returns_alike_is_taken_in(digests: dict[str, str]) -> None:
    """One kind that it does not know is left to the ranks."""
    job = Job(OURS)
    back = returned(job, digests)
    assert back.code == "" and job.hub.waiting() == [C]
    job.lose(stepped=True)
    assert job.meet(A, B, attempt=2)[0].channel.hosts == (A, B, C)
    back.end()
    job.hub.close()


def test_a_host_that_returns_with_other_data_is_refused_alone() -> None:
    job = Job(OURS)
    back = returned(job, OURS | {"data data.train": "4", "config seed": "5"})
    back.end()
    assert back.code == "hosts_differ" and job.hub.waiting() == []
    for said in (back.error, *job.said[-1:]):
        assert "seed, data data.train" in said and "data.root" not in said
    job.hub.close()


def test_a_host_that_cannot_read_its_data_does_not_come() -> None:
    job = Job(OURS)
    job.lose(C, stepped=True)
    job.world = job.meet(A, B, attempt=1)
    back = job.begin(C, compare=(sys.executable, "-c", "raise SystemExit(2)"))
    wait_for(lambda: job.hub.watch() or not back.thread.is_alive(), 20)
    assert back.code == "host_not_ready" and job.hub.waiting() == []
    job.hub.close()


def test_another_command_of_a_returning_host_ends_nothing() -> None:
    job = Job()
    job.lose(C, stepped=True)
    job.world = job.meet(A, B, attempt=1)
    back = Host(host(C, (A, B, C), min_hosts=2), job.port)
    back.start()
    wait_for(lambda: job.hub.watch() or not back.thread.is_alive(), 20)
    assert back.code == "hosts_differ"
    job.hub.close()


def test_a_host_that_comes_and_goes_is_held_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times without a step; the pause doubles, and ends."""
    monkeypatch.setattr(rendezvous, "_HOLD_SECONDS", 2.0)
    job = Job()
    for attempt in (1, 2, 3):
        job.lose(C, stepped=False)
        if attempt < 3:
            job.world = job.meet(A, B, C, attempt=attempt)
    assert sum("for 2 s" in line for line in job.said) == 1
    back = job.begin(C, attempt=3)
    job.world = job.meet(A, B, attempt=3)
    assert job.world[0].channel.hosts == (A, B)
    assert job.hub.waiting() == []
    wait_for(lambda: job.hub.watch() or job.hub.waiting() == [C], 20)
    assert not any("next checkpoint" in line for line in back.said)
    job.lose(stepped=True)
    job.world = job.meet(A, B, attempt=4)
    assert job.world[0].channel.hosts == (A, B, C)
    job.lose(C, stepped=False)
    assert sum("for 4 s" in line for line in job.said) == 1
    back.end()
    job.hub.close()


def test_a_host_that_is_held_off_comes_where_too_few_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "_RETURN_SECONDS", 0.5)
    job = Job(least=2)
    for attempt in (1, 2, 3):
        job.lose(C, stepped=False)
        if attempt < 3:
            job.world = job.meet(A, B, C, attempt=attempt)
    assert any("held off" in line for line in job.said)
    job.world = job.meet(A, C, attempt=3)  # B is gone by now
    assert job.world[0].channel.hosts == (A, C)
    job.hub.close()


def test_a_hub_that_comes_back_with_another_command_ends_alone() -> None:
    port, hosts = free_port(), (A, B, C)
    waits = Host(host(B, hosts, attempt=1, changes=1, min_hosts=2), port)
    waits.start()
    wrong = Host(host(A, hosts, min_hosts=2, rejoin_seconds=9), port)
    wrong.start()
    wrong.thread.join(20)
    assert wrong.code == "hosts_differ" and waits.thread.is_alive()
    wrong.hub.close()
    right = Host(host(A, hosts, min_hosts=2), port)
    right.start()
    for each in (right, waits):
        each.thread.join(20)
        assert each.error == "" and each.channel.hosts == (A, B)
    right.end()
    waits.end()


@pytest.mark.parametrize("stopped", [True, False])
def test_a_host_that_waits_to_be_taken_in_ends_as_the_job_does(stopped: bool) -> None:
    job = Job()
    job.lose(C, stepped=True)
    job.world = job.meet(A, B, attempt=1)
    back = job.begin(C)
    wait_for(lambda: job.hub.watch() or job.hub.waiting() == [C], 20)
    job.hub.close(stopped)
    back.thread.join(20)
    assert (back.error == "stopped", back.code) == (stopped, "" if stopped else "job_over")

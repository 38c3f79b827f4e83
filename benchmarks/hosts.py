"""Measures what many hosts and ranks on loopback need to find each other and to agree.

    python -m benchmarks.hosts store --count 1000              # ranks at one TCP store
    python -m benchmarks.hosts rendezvous --count 1000 4000    # hosts of a run

Rank 0, or the hub of the hosts, is a process of its own; all others are threads of a few more
processes.  Rank 0's and the hub's CPU seconds are those of a real run; times also depend on the
cores that the others share.

The hosts of a run meet; then one host is killed, returns, and a quarter of all is killed.  Each
time all hosts learn of it (`verdict_seconds`) and those that are left meet again (`met_seconds`,
from the kill, or from the start of the host that returns).
"""

import argparse
import itertools
import json
import multiprocessing
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ppdist.common.process import STOPPED
from ppdist.distributed import paddle_api, store
from ppdist.launch.handshake import Handshake
from ppdist.launch.outcome import Outcome
from ppdist.launch.rendezvous import Hub, rendezvous

_PROCESSES = 4  # that hold the other ranks or hosts
_WATCH_SECONDS = 10.0  # for which every host is watched after the rendezvous
_LONGEST_SECONDS = 600.0  # of one event
_ROUNDS = 3
_PORT = 17070
_FORK = multiprocessing.get_context("fork")


class _Ranks(threading.local):
    """The rank of the calling thread, with its client."""

    rank = 0
    client: Any = None

    def __init__(self) -> None:
        self.barriers = itertools.count()

    def __next__(self) -> int:
        return next(self.barriers)


def _run_ranks(ranks: Sequence[int], count: int, port: int, out: Connection) -> None:
    """Meets the other ranks, each in a thread; rank 0 sends its seconds."""
    this_rank = _Ranks()
    store.rank, store.world_size = lambda: this_rank.rank, lambda: count  # type: ignore[assignment]
    store._barriers, store._store = this_rank, lambda: this_rank.client  # type: ignore[assignment]

    def run_rank(rank: int) -> None:
        this_rank.rank, this_rank.client = rank, paddle_api.make_store("127.0.0.1", port, rank == 0)
        store.disable_nagle()
        if rank == 0:
            out.send("listening")
        value = {"host": f"host-{rank}", "digests": ["0" * 64] * 3}
        store.all_gather_object(value)  # once all have connected
        figures = {}
        for name, meet in (("barrier", store.barrier), *_meetings(value)):
            began, worked = time.monotonic(), time.process_time()
            for _ in range(_ROUNDS):
                meet()
            figures[f"{name}_seconds"] = (time.monotonic() - began) / _ROUNDS
            figures[f"{name}_cpu_seconds"] = (time.process_time() - worked) / _ROUNDS
        if rank == 0:
            out.send(figures)

    _run_threads(run_rank, ranks)


def _meetings(value: Any) -> list[tuple[str, Callable[[], Any]]]:
    return [
        ("all_gather_object", lambda: store.all_gather_object(value)),
        ("run_on_all_ranks", lambda: store.run_on_all_ranks(lambda: None)),
    ]


class _Job:
    """A simulated run of many hosts; the hub and the last host have a process each.

    Attributes:
        shares: the hosts of each process.
        processes: the processes that run, by share.
        met, ended: when each host last met the others, and last knew how a world ended.
    """

    def __init__(self, count: int, port: int) -> None:
        self.hosts = tuple(f"127.2.{index // 200}.{1 + index % 200}" for index in range(count))
        self.port, middle = port, range(1, count - 1)
        shares = (middle[first::_PROCESSES] for first in range(_PROCESSES))
        self.shares = [range(1), *shares, range(count - 1, count)]
        self.processes: dict[int, BaseProcess] = {}
        self.met, self.ended = _FORK.RawArray("d", count), _FORK.RawArray("d", count)
        self.saved_step, self.longest_line = _FORK.RawValue("i"), _FORK.RawValue("i")
        self.listens, self.is_over = _FORK.Event(), _FORK.RawValue("b")

    def start(self, share: int) -> None:
        process = _FORK.Process(target=_run_threads, args=(self.run_host, self.shares[share]))
        process.start()
        self.processes[share] = process

    def kill(self, share: int) -> None:
        process = self.processes.pop(share)
        process.kill()
        process.join()

    def run_host(self, index: int) -> None:
        """Runs a host as `fleetrun` does, with ranks that end as soon as they are asked to."""
        handshake = Handshake(
            host=self.hosts[index], hosts=self.hosts, processes=8, device="cpu", script="train.py",
            arguments=("-c", "x.yml"), ppdist="1", paddle="3", names=self.hosts, min_hosts=1,
        )  # fmt: skip
        hub = None if index else Hub(handshake, self.port, self.note_line)
        if hub is not None:
            self.listens.set()
        outcome = Outcome(0, "", goes_on=True)
        while outcome.goes_on:
            channel = rendezvous(handshake, self.port, _LONGEST_SECONDS, self.note_line, hub=hub)
            self.met[index] = time.monotonic()
            while not (channel.watch([]) or self.is_over.value):
                channel.take_in(lambda: self.saved_step.value)
                # Real hosts all watch every 0.2 s; here they share the cores with the hub.
                time.sleep(0.2 if hub is not None else max(0.5, len(self.hosts) / 2000))
            outcome = channel.finish(Outcome(0 if self.is_over.value else STOPPED, ""), [])
            self.ended[index] = time.monotonic()
            if hub is not None:
                hub.count_comings(stepped=True)
            attempt, changes = channel.attempt + 1, channel.changes + 1
            handshake = replace(handshake, attempt=attempt, changes=changes)
        if hub is not None:
            hub.close()

    def note_line(self, line: str) -> None:
        self.longest_line.value = max(self.longest_line.value, len(line))

    def measure(self, name: str, act: Callable[[], object]) -> dict[str, float]:
        """Measures an event, until all hosts that run then have met again.

        Returns: seconds and CPU seconds, each named after the event.
        """
        hub, before = self.processes[0], {*self.processes}
        began, worked = time.monotonic(), _cpu_seconds(hub)
        act()
        met = self.wait_for(self.met, began, {*self.processes})
        figures = {
            f"{name}_met_seconds": met,
            f"{name}_hub_cpu_seconds": _cpu_seconds(hub) - worked,
        }
        if min(self.ended[:1]) > began:
            stayed = before & {*self.processes}
            figures[f"{name}_verdict_seconds"] = self.wait_for(self.ended, began, stayed)
        return figures

    def wait_for(self, times: Sequence[float], began: float, shares: Collection[int]) -> float:
        """Waits until the times of all hosts of `shares` are later than `began`.

        Returns: the seconds from `began` to the last of them.
        """
        indices = [index for share in shares for index in self.shares[share]]
        while min(times[index] for index in indices) < began:
            has_hub = self.processes[0].is_alive() or self.is_over.value
            if not has_hub or time.monotonic() - began > _LONGEST_SECONDS:
                raise RuntimeError(f"the hub of {len(self.hosts)} hosts ended, or hosts hang")
            time.sleep(0.05)
            self.saved_step.value += 1  # a host that returns waits for a new checkpoint
        return max(times[index] for index in indices) - began


def _cpu_seconds(process: BaseProcess) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_hosts(count: int, port: int) -> Iterator[dict[str, float]]:
    """Yields the figures of a job of `count` hosts, event by event, from its start to its end."""
    job = _Job(count, port)
    last = len(job.shares) - 1
    try:
        job.start(0)
        job.listens.wait(_LONGEST_SECONDS)
        yield job.measure("all", lambda: [job.start(share) for share in range(1, last + 1)])
        worked = _cpu_seconds(job.processes[0])
        time.sleep(_WATCH_SECONDS)
        worked = _cpu_seconds(job.processes[0]) - worked
        yield {"watching_share_of_a_core": worked / _WATCH_SECONDS}
        yield job.measure("one_lost", lambda: job.kill(last))
        yield job.measure("one_returns", lambda: job.start(last))
        yield job.measure("quarter_lost", lambda: job.kill(1))
        began, job.is_over.value = time.monotonic(), 1
        finish = job.wait_for(job.ended, began, job.processes)
        yield {"finish_seconds": finish, "longest_line_characters": job.longest_line.value}
    finally:
        for process in job.processes.values():
            process.kill()


def _run_threads(run: Callable[[int], None], numbers: Sequence[int]) -> None:
    # Python wakes every thread that waits for another one this often; by default every 5 ms.
    sys.setswitchinterval(0.2)
    threading.stack_size(256 * 1024)
    threads = [threading.Thread(target=run, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure_ranks(count: int, port: int) -> Iterator[dict[str, float]]:
    """Yields the figures that rank 0 of `count` sends."""
    receiver, sender = _FORK.Pipe(duplex=False)
    shares = [[0], *(list(range(1 + first, count, _PROCESSES)) for first in range(_PROCESSES))]
    processes = [
        _FORK.Process(target=_run_ranks, args=(share, count, port, sender)) for share in shares
    ]
    try:
        processes[0].start()
        receiver.recv()
        for process in processes[1:]:
            process.start()
        while not receiver.poll(1.0):
            if processes[0].exitcode is not None:
                raise RuntimeError(f"the first of {count} ended without a word")
        yield receiver.recv()
    finally:
        processes[0].join(30)
        for process in processes[1:]:
            process.kill()


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks.hosts", None, __doc__, formatter_class=form
    )
    parser.add_argument("what", choices=("store", "rendezvous"))
    parser.add_argument("--count", type=int, nargs="+", default=[1000], help="ranks, or hosts")
    arguments = parser.parse_args()
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    os.environ.setdefault("GLOG_minloglevel", "2")
    measure = measure_ranks if arguments.what == "store" else measure_hosts
    for number, count in enumerate(arguments.count):
        for figures in measure(count, _PORT + number):
            rounded = {name: round(value, 4) for name, value in figures.items()}
            print(json.dumps({"what": arguments.what, "count": count, **rounded}), flush=True)


if __name__ == "__main__":
    main()

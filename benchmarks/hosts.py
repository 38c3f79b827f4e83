"""Measures what many hosts and ranks on loopback need to find each other and to agree.

    python -m benchmarks.hosts store --count 1000         # ranks at one TCP store
    python -m benchmarks.hosts rendezvous --count 1000    # hosts of a run

Rank 0, or the first host, is a process of its own; all others are threads of a few more processes.
Rank 0's CPU seconds are those of a real run; times also depend on the cores that the others share.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import resource
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from ppdist.distributed import paddle_api, store
from ppdist.launch.handshake import Handshake
from ppdist.launch.outcome import Outcome
from ppdist.launch.rendezvous import Hub, rendezvous

_PROCESSES = 4  # that hold the other ranks or hosts
_WATCH_SECONDS = 10.0  # for which every host is watched after the rendezvous
_ROUNDS = 3
_PORT = 17070


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
    threading.stack_size(256 * 1024)

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


def _run_hosts(indices: Sequence[int], count: int, port: int, out: Connection) -> None:
    """Meets the other hosts, each in a thread; the first sends its figures."""
    hosts = tuple(f"127.2.{index // 200}.{1 + index % 200}" for index in range(count))
    threading.stack_size(256 * 1024)

    def run_host(index: int) -> None:
        handshake = Handshake(
            host=hosts[index], hosts=hosts, processes=8, device="cpu", script="train.py",
            arguments=("-c", "x.yml"), ppdist="1", paddle="3", names=hosts,
        )  # fmt: skip
        lines: list[str] = []
        began, worked = time.monotonic(), time.process_time()
        hub = None if index else Hub(handshake, port, lines.append)
        channel = rendezvous(handshake, port, 600.0, lines.append, hub=hub)
        met_at, cpu_at_meeting = time.monotonic(), time.process_time()
        while time.monotonic() - met_at < _WATCH_SECONDS:
            channel.watch([])
            time.sleep(0.2 if index == 0 else 0.5)
        watched = time.process_time()
        if index:
            channel.finish(Outcome(0, ""), [])
            return
        out.send(
            {
                "connected_seconds": met_at - began,
                "connected_cpu_seconds": cpu_at_meeting - worked,
                "watching_share_of_a_core": (watched - cpu_at_meeting) / _WATCH_SECONDS,
                "longest_line_characters": max(map(len, lines)),
                "code": channel.finish(Outcome(0, ""), []).code,
                "finish_seconds": time.monotonic() - met_at - _WATCH_SECONDS,
            }
        )

    if 0 in indices:
        out.send("listening")
    _run_threads(run_host, indices)


def _run_threads(run: Callable[[int], None], numbers: Sequence[int]) -> None:
    threads = [threading.Thread(target=run, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(run: Callable[..., None], count: int, port: int) -> dict[str, Any]:
    """Returns the figures that number 0 of `count` sends."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    shares = [[0], *(list(range(1 + first, count, _PROCESSES)) for first in range(_PROCESSES))]
    processes = [context.Process(target=run, args=(share, count, port, sender)) for share in shares]
    try:
        processes[0].start()
        receiver.recv()
        for process in processes[1:]:
            process.start()
        while not receiver.poll(1.0):
            if processes[0].exitcode is not None:
                raise RuntimeError(f"the first of {count} ended without a word")
        return receiver.recv()
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
    run = _run_ranks if arguments.what == "store" else _run_hosts
    for number, count in enumerate(arguments.count):
        result = measure(run, count, _PORT + number)
        rounded = {name: round(value, 4) for name, value in result.items()}
        print(json.dumps({"what": arguments.what, "count": count, **rounded}), flush=True)


if __name__ == "__main__":
    main()

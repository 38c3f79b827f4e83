"""Many hosts and ranks on loopback: what finding each other and agreeing costs.

    python -m benchmarks.hosts store --count 1000         # ranks at one TCP store
    python -m benchmarks.hosts rendezvous --count 1000    # hosts of a run

Rank 0, or the first host, is a process of its own; all others are threads of a few more.  Rank 0's
CPU seconds are those of the real thing; times also depend on the cores that the others share.
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

_PROCESSES = 4  # that hold the others
_WATCH_SECONDS = 10.0  # in which every host is watched once they have met
_ROUNDS = 3
_PORT = 17070


class _Ranks(threading.local):
    """Of the thread that asks."""

    rank = 0
    client: Any = None

    def __init__(self) -> None:
        self.barriers = itertools.count()

    def __next__(self) -> int:
        return next(self.barriers)


def _be_ranks(ranks: Sequence[int], count: int, port: int, out: Connection) -> None:
    """Meets the other ranks, each in a thread; rank 0 tells its seconds."""
    own = _Ranks()
    store.rank, store.world_size = lambda: own.rank, lambda: count  # type: ignore[assignment]
    store._barriers, store._store = own, lambda: own.client  # type: ignore[assignment]
    threading.stack_size(256 * 1024)

    def be(rank: int) -> None:
        own.rank, own.client = rank, paddle_api.make_store("127.0.0.1", port, rank == 0)
        store.disable_nagle()
        if rank == 0:
            out.send("listening")
        value = {"host": f"host-{rank}", "digests": ["0" * 64] * 3}
        store.all_gather_object(value)  # once all have connected
        told = {}
        for name, meet in (("barrier", store.barrier), *_meetings(value)):
            began, worked = time.monotonic(), time.process_time()
            for _ in range(_ROUNDS):
                meet()
            told[f"{name}_seconds"] = (time.monotonic() - began) / _ROUNDS
            told[f"{name}_cpu_seconds"] = (time.process_time() - worked) / _ROUNDS
        if rank == 0:
            out.send(told)

    _all_at_once(be, ranks)


def _meetings(value: Any) -> list[tuple[str, Callable[[], Any]]]:
    return [
        ("all_gather_object", lambda: store.all_gather_object(value)),
        ("run_on_all_ranks", lambda: store.run_on_all_ranks(lambda: None)),
    ]


def _be_hosts(places: Sequence[int], count: int, port: int, out: Connection) -> None:
    """Meets the other hosts, each in a thread; the first tells."""
    hosts = tuple(f"127.2.{place // 200}.{1 + place % 200}" for place in range(count))
    threading.stack_size(256 * 1024)

    def be(place: int) -> None:
        mine = Handshake(
            host=hosts[place], hosts=hosts, processes=8, device="cpu", script="train.py",
            arguments=("-c", "x.yml"), ppdist="1", paddle="3", names=hosts,
        )  # fmt: skip
        said: list[str] = []
        began, worked = time.monotonic(), time.process_time()
        hub = None if place else Hub(mine, port, said.append)
        channel = rendezvous(mine, port, 600.0, said.append, hub=hub)
        met, worked_then = time.monotonic(), time.process_time()
        while time.monotonic() - met < _WATCH_SECONDS:
            channel.watch([])
            time.sleep(0.2 if place == 0 else 0.5)
        watched = time.process_time()
        if place:
            channel.finish(Outcome(0, ""), [])
            return
        out.send(
            {
                "connected_seconds": met - began,
                "connected_cpu_seconds": worked_then - worked,
                "watching_share_of_a_core": (watched - worked_then) / _WATCH_SECONDS,
                "longest_line_characters": max(map(len, said)),
                "code": channel.finish(Outcome(0, ""), []).code,
                "finish_seconds": time.monotonic() - met - _WATCH_SECONDS,
            }
        )

    if 0 in places:
        out.send("listening")
    _all_at_once(be, places)


def _all_at_once(be: Callable[[int], None], numbers: Sequence[int]) -> None:
    threads = [threading.Thread(target=be, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(be: Callable[..., None], count: int, port: int) -> dict[str, Any]:
    """What number 0 of `count` tells."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    shares = [[0], *(list(range(1 + first, count, _PROCESSES)) for first in range(_PROCESSES))]
    processes = [context.Process(target=be, args=(share, count, port, sender)) for share in shares]
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
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.environ.setdefault("GLOG_minloglevel", "2")
    be = _be_ranks if arguments.what == "store" else _be_hosts
    for number, count in enumerate(arguments.count):
        result = measure(be, count, _PORT + number)
        shown = {name: round(value, 4) for name, value in result.items()}
        print(json.dumps({"what": arguments.what, "count": count, **shown}), flush=True)


if __name__ == "__main__":
    main()

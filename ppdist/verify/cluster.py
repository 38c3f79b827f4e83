"""Measured speed of a cluster: computing, all-reduce, each link.

What `ppdist doctor` runs on every rank.  All ranks compute and sum at once, as in training; the
links are measured one after the other, so that none waits for another's traffic.  The paths of a
GPU were not run on one.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from statistics import median
from typing import Any

import paddle

from ppdist.config.distributed import DistributedConfig
from ppdist.config.experiment import ExperimentConfig
from ppdist.data.datasets.build import read_split
from ppdist.distributed import comm, device
from ppdist.distributed.agreement import differences, require_agreement
from ppdist.engine.data import require_same_data
from ppdist.engine.preflight import digests_of_code, preflight, require_sum, versions, within

Report = dict[str, Any]
SIZES = tuple(1024 * 4**power for power in range(9))  # bytes, 1 KiB to 64 MiB
_STAGE_SECONDS = 60.0
_SIZE_SECONDS = 0.2  # so long, at most 20 times and at least 3, each size is summed
_LONGEST_SECONDS = 4.0  # no larger message than takes so long: gloo gives up after 30
_PINGS = 20
_CLOCK_ROUNDS = 3  # ranks leave a barrier one after the other: the least difference counts
_SIDE, _SIDE_ON_CPU = 8192, 1024  # of the square matrices that are multiplied
_PIECE_BYTES, _PIECE_BYTES_ON_CPU = 64 << 20, 4 << 20  # sent to find the rate of a link
_ALL_PAIRS = 8  # ranks up to which every pair is measured; of more only neighbours in rank


def check_ranks(config: ExperimentConfig | None) -> list[str]:
    """Joins the other ranks and compares software, settings and data.

    Collective.

    Args: config: of the experiment, or None for what any run needs.
    Returns: warnings.
    Raises: UserError, on every rank: they differ, cannot sum, or the data are wrong.
    """
    with within(_STAGE_SECONDS, "joining the other ranks"):
        wanted = config.device if config else "auto"
        comm.init(wanted, config.distributed if config else DistributedConfig())
    if config is None:
        require_agreement({"versions": versions(), "code": digests_of_code()})
        require_sum()
        return []
    warnings = preflight(config, evaluate=True)
    classes = config.model.num_classes
    for dataset in (
        comm.run_on_all_ranks(lambda: read_split(config.data, "train", classes)),
        comm.run_on_all_ranks(lambda: read_split(config.data, "val", classes)),
    ):
        require_same_data(dataset, config.data)
    return warnings


def measure_cluster() -> Report:
    """Everything, as plain data, the same on every rank.  Collective, after `check_ranks`.

    Returns: `ranks`, `sizes`, `links` as the functions below say, and what a model of the ring
        needs so that t = 2 (n-1) latency + 2 (n-1)/n bytes / bandwidth gives what was measured
        at both ends: `latency_seconds` from the smallest message, `bandwidth_bytes_per_second`
        (the bus bandwidth) from the largest.  None on one rank.
    """
    world = comm.world_size()
    hosts_W = comm.all_gather_object(comm.host())
    report: Report = {"world": world, "hosts": hosts_W, "device": paddle.device.get_device()}
    with within(_STAGE_SECONDS, "measuring how fast every rank computes"):
        report["ranks"] = measure_computing(hosts_W)
    report["sizes"] = list(measure_all_reduce()) if world > 1 else []
    report["links"] = measure_links(hosts_W)
    report["latency_seconds"] = report["bandwidth_bytes_per_second"] = None
    if world > 1:
        report["latency_seconds"] = report["sizes"][0]["seconds"] / (2 * (world - 1))
        report["bandwidth_bytes_per_second"] = report["sizes"][-1]["bus_bytes_per_second"]
    return report


def compare_hosts(facts: dict[str, str]) -> Report:
    """Differences between hosts other than software, equal on every rank.

    Collective.

    Args: facts: what this host has, by name (ppdist/launch/doctor.py).
    Returns: `differences`, a line for each fact that is not the same everywhere, and `clocks`, how
        many seconds each host's clock is ahead of the first one's, to some milliseconds.
    """
    hosts_W = comm.all_gather_object(comm.host())
    lines = list(differences(comm.all_gather_object(facts), hosts_W))
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        comm.barrier()
        rounds.append(comm.all_gather_object(time.time()))
    ahead_W = [
        min((times[rank] - times[0] for times in rounds), key=abs) for rank in range(len(hosts_W))
    ]
    firsts = [hosts_W.index(host) for host in dict.fromkeys(hosts_W)]
    clocks = [{"host": hosts_W[rank], "seconds": ahead_W[rank]} for rank in firsts]
    return {"differences": lines, "clocks": clocks}


def measure_computing(hosts_W: list[str]) -> list[Report]:
    """Times a float32 matrix product on all ranks at once.

    Collective.

    Returns: `seconds` and `flops_per_second` of each rank.
    """
    side = _SIDE if device.on_accelerator() else _SIDE_ON_CPU
    matrix = paddle.ones([side, side])
    _seconds(lambda: paddle.matmul(matrix, matrix))
    comm.barrier()
    seconds = median(_seconds(lambda: paddle.matmul(matrix, matrix)) for _ in range(7))
    return [
        {"rank": rank, "host": host, "seconds": took, "flops_per_second": 2 * side**3 / took}
        for rank, (host, took) in enumerate(zip(hosts_W, _of_all_ranks(seconds)))
    ]


def measure_all_reduce() -> Iterator[Report]:
    """Yields `seconds` and two bandwidths of an all-reduce of each size.

    `seconds` is the median over repeats, of the slowest rank.  The bandwidths of n ranks are as
    nccl-tests defines them (NVIDIA/nccl-tests, doc/PERFORMANCE.md): algorithm bandwidth is
    bytes / seconds; bus bandwidth is that times 2 (n-1)/n, what each rank's link carries whatever n
    is.  It ends early where the next size would take too long.
    """
    factor = 2 * (comm.world_size() - 1) / comm.world_size()
    for size in SIZES:
        with within(_STAGE_SECONDS, f"an all-reduce of {size} bytes"):
            values = paddle.zeros([size // 4])
            work = partial(comm.all_reduce_sum, values)
            first = max(_of_all_ranks(_seconds(work)))
            count = min(20, max(3, int(_SIZE_SECONDS / first)))  # the same on every rank
            own = median(_seconds(work) for _ in range(count))
            seconds = max(_of_all_ranks(own))
        rate = size / seconds
        yield {
            "bytes": size,
            "seconds": seconds,
            "algorithm_bytes_per_second": rate,
            "bus_bytes_per_second": factor * rate,
        }
        if 4 * seconds > _LONGEST_SECONDS:
            return


def measure_links(hosts_W: list[str]) -> list[Report]:
    """Per pair of ranks `latency_seconds` (one way) and `bytes_per_second`.

    All pairs of up to 8 ranks; of more each rank with the next, as a ring sends.
    """
    world = len(hosts_W)
    pairs = list(combinations(range(world), 2))
    if world > _ALL_PAIRS:
        pairs = [(rank, rank + 1) for rank in range(world - 1)] + [(0, world - 1)]
    measured = {}
    for number, pair in enumerate(pairs):
        with within(_STAGE_SECONDS, f"the exchange between ranks {pair[0]} and {pair[1]}"):
            link = comm.open_link(*pair)
            if comm.rank() in pair:
                measured[number] = _measure_link(*pair, link)
            comm.all_reduce_sum(paddle.zeros([1]))  # the others wait for their turn
    told_W = comm.all_gather_object({str(n): found for n, found in measured.items() if found})
    found = {int(n): value for told in told_W for n, value in told.items()}
    return [
        {"ranks": [a, b], "hosts": [hosts_W[a], hosts_W[b]], **found[number]}
        for number, (a, b) in enumerate(pairs)
    ]


def _measure_link(first: int, second: int, link: Any) -> Report | None:
    """Measures the link of two ranks, which both call it.

    Returns: the measurement on the first one, None on the second.
    """
    piece = paddle.zeros([(_PIECE_BYTES if device.on_accelerator() else _PIECE_BYTES_ON_CPU) // 4])
    mark = paddle.zeros([1])
    if comm.rank() == second:
        for _ in range(_PINGS + 1):
            comm.receive(mark, first, link)
            comm.send(mark, first, link)
        repeats = 1
        while repeats:
            comm.receive(piece, first, link)
            comm.send(mark, first, link)
            comm.receive(mark, first, link)
            repeats = int(mark[0])
        return None

    def ping() -> None:
        comm.send(mark, second, link)
        comm.receive(mark, second, link)

    def transfer() -> None:
        comm.send(piece, second, link)
        comm.receive(mark, second, link)

    _seconds(ping)  # opens the connection
    latency = median(_seconds(ping) for _ in range(_PINGS)) / 2
    took: list[float] = []
    while not took or (len(took) < 5 and sum(took) < 1):
        if took:
            comm.send(paddle.ones([1]), second, link)
        took.append(_seconds(transfer))
    comm.send(paddle.zeros([1]), second, link)
    rate = 4 * piece.size / max(median(took) - latency, 1e-9)
    return {"latency_seconds": latency, "bytes_per_second": rate}


def _seconds(work: Callable[[], Any]) -> float:
    """How long the work takes, the GPU's part of it included."""
    began = time.perf_counter()
    work()
    device.synchronize()
    return time.perf_counter() - began


def _of_all_ranks(value: float) -> list[float]:
    return comm.all_gather(paddle.to_tensor([value], dtype="float32"))[:, 0].tolist()

"""What `tools/doctor.py` measured between ranks (ppdist/link_speed.py), in words and a table."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median, median_high, median_low
from typing import Any

from ppdist.launch.doctor import OK, WARN, Finding

Report = Mapping[str, Any]
_SLOW_COMPUTING = 1.5  # times the median time: well beyond what equal machines differ by
_SLOW_LINK = 0.5  # of the rate to expect
_CLOCK_SECONDS = 1.0  # apart; a run measures time by other clocks, its logs are read by these
# What hosts are compared by (ppdist/launch/equipment.py), and what helps where they differ.
_REMEDIES = {
    "cards": "every step waits for the slowest card, and the smallest memory sets the batch",
    "driver": "install the same on every host",
    "CUDA of Paddle": "install the same build of Paddle on every host",
    "cores": "the host with the fewest sets the pace of loading: give data.workers there its own",
    "RDMA": "NCCL uses what all hosts have: look at the host with less (ibstat, lspci)",
    "MTU": "set it alike on all hosts: large packets may vanish, so that only large messages hang",
    "speed": "every step waits for the slowest link",
}


def judge_speed(report: Report) -> Iterator[Finding]:
    """Names the slow rank and the slow link; what all have in common is no finding."""
    yield _judge_computing(report["ranks"])
    if report["world"] == 1:
        yield Finding(OK, "links", "one process: nothing to measure between ranks")
        return
    latency, rate = report["latency_seconds"], report["bandwidth_bytes_per_second"]
    found = f"{1e6 * report['sizes'][0]['seconds']:.0f} us for 1 KiB, bus bandwidth {_rate(rate)}"
    yield Finding(OK, "all-reduce", f"{found} ({1e6 * latency:.0f} us a hop)")
    for within, kind in ((True, "links within hosts"), (False, "links between hosts")):
        links = [link for link in report["links"] if (len(set(link["hosts"])) == 1) == within]
        if links:
            yield _judge_links(links, kind)


def judge_hosts(report: Report) -> Iterator[Finding]:
    """Of several hosts: what they have not alike, and whose clock is wrong."""
    if len(report["clocks"]) == 1:
        return
    for line in report["differences"]:
        yield Finding(WARN, "hosts differ", line, _REMEDIES[line.partition(":")[0]])
    if not report["differences"]:
        yield Finding(OK, "hosts alike", f"in {', '.join(_REMEDIES)}")
    apart = [clock for clock in report["clocks"] if abs(clock["seconds"]) > _CLOCK_SECONDS]
    if not apart:
        largest = max(abs(clock["seconds"]) for clock in report["clocks"])
        yield Finding(OK, "clocks", f"within {1e3 * largest:.0f} ms of one another")
        return
    said = ", ".join(
        f"host {clock['host']} is {abs(clock['seconds']):.1f} s "
        f"{'ahead of' if clock['seconds'] > 0 else 'behind'} the first one"
        for clock in apart
    )
    yield Finding(WARN, "clocks", said, "keep them right with chrony or systemd-timesyncd")


def _judge_computing(ranks: Sequence[Report]) -> Finding:
    middle = median_low(rank["seconds"] for rank in ranks)  # of two, the faster is the measure
    slow = [rank for rank in ranks if rank["seconds"] > _SLOW_COMPUTING * middle]
    rate = f"{median_high(rank['flops_per_second'] for rank in ranks) / 1e9:.0f} GFLOP/s a rank"
    if not slow:
        return Finding(OK, "computing", rate)
    named = ", ".join(
        f"rank {rank['rank']} (host {rank['host']}) takes {rank['seconds'] / middle:.1f} times "
        f"as long"
        for rank in slow
    )
    remedy = (
        "every step waits for the slowest rank: look there for other programs (top, nvidia-smi), "
        "heat, power limits, and too few cores for its processes"
    )
    return Finding(WARN, "computing", f"{rate}, but {named}", remedy)


def _judge_links(links: Sequence[Report], kind: str) -> Finding:
    """A rank is slow when its best link is far below that of most ranks; a link, when it is far
    below the best ones of both of its ends."""
    host_of = {rank: host for link in links for rank, host in zip(link["ranks"], link["hosts"])}
    best = {
        rank: max(link["bytes_per_second"] for link in links if rank in link["ranks"])
        for rank in host_of
    }
    usual = median_high(best.values())
    said = [
        f"rank {rank} (host {host_of[rank]}) reaches {_rate(rate)} at most"
        for rank, rate in sorted(best.items())
        if rate < _SLOW_LINK * usual
    ]
    for link in links:
        expected = min(best[rank] for rank in link["ranks"])
        if link["bytes_per_second"] < _SLOW_LINK * expected:
            (a, b), (host_a, host_b) = link["ranks"], link["hosts"]
            rate = _rate(link["bytes_per_second"])
            said.append(f"rank {a} (host {host_a}) to rank {b} (host {host_b}) carries {rate}")
    rates = [link["bytes_per_second"] for link in links]
    found = f"{len(links)}, median {_rate(median(rates))}, slowest {_rate(min(rates))}"
    if not said:
        return Finding(OK, kind, found)
    remedy = (
        "the whole ring is as slow as its slowest link: look at the speed of its interface "
        "(ethtool), its cable, and which one is used (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
    )
    return Finding(WARN, kind, f"{found}; {'; '.join(said)}", remedy)


def table(report: Report) -> Iterator[str]:
    """Lines for the terminal."""
    yield f"{report['world']} ranks, {report['device']}"
    if report["sizes"]:
        yield f"{'all-reduce of':>14}  {'time':>10}  {'algorithm':>11}  {'bus':>11}"
    for row in report["sizes"]:
        rates = (_rate(row[f"{name}_bytes_per_second"]) for name in ("algorithm", "bus"))
        algorithm, bus = rates
        time = f"{1e3 * row['seconds']:.3f} ms"
        yield f"{_bytes(row['bytes']):>14}  {time:>10}  {algorithm:>11}  {bus:>11}"
    if report["links"]:
        yield f"{'link':>14}  {'latency':>10}  {'rate':>11}"
    for link in report["links"]:
        pair = f"{link['ranks'][0]} - {link['ranks'][1]}"
        latency = f"{1e6 * link['latency_seconds']:.0f} us"
        hosts = " - ".join(link["hosts"])
        yield f"{pair:>14}  {latency:>10}  {_rate(link['bytes_per_second']):>11}  {hosts}"
    yield f"{'rank':>14}  {'product':>10}  {'speed':>13}"
    for rank in report["ranks"]:
        time = f"{1e3 * rank['seconds']:.1f} ms"
        speed = f"{rank['flops_per_second'] / 1e9:.0f} GFLOP/s"
        yield f"{rank['rank']:>14}  {time:>10}  {speed:>13}  {rank['host']}"


def _bytes(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def _rate(bytes_per_second: float) -> str:
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.2f} GB/s"
    return f"{bytes_per_second / 1e6:.1f} MB/s"

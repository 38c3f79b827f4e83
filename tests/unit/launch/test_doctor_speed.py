"""What is said of a measured cluster: the slow rank and the slow link by name."""

from typing import Any

from ppdist.launch.doctor import OK, WARN, judge_speed, table


def report(
    links: dict[tuple[int, int], float], seconds: tuple[float, ...], hosts: str
) -> dict[str, Any]:
    """A cluster whose ranks are on hosts named by one letter each; links in bytes per second."""
    return {
        "world": len(hosts),
        "hosts": list(hosts),
        "device": "cpu",
        "latency_seconds": 1e-5,
        "bandwidth_bytes_per_second": 1e9,
        "ranks": [
            {"rank": rank, "host": hosts[rank], "seconds": took, "flops_per_second": 2e9 / took}
            for rank, took in enumerate(seconds)
        ],
        "sizes": [
            {
                "bytes": size,
                "seconds": 1e-4,
                "algorithm_bytes_per_second": 1e7,
                "bus_bytes_per_second": 1e7,
            }
            for size in (1024, 1 << 20)
        ],
        "links": [
            {
                "ranks": list(pair),
                "hosts": [hosts[rank] for rank in pair],
                "latency_seconds": 1e-4,
                "bytes_per_second": rate,
            }
            for pair, rate in links.items()
        ],
    }


def test_equal_ranks_and_links_are_no_finding() -> None:
    even = report({(0, 1): 1e9, (0, 2): 1.2e9, (1, 2): 0.9e9}, (1.0, 1.1, 0.9), "abc")
    findings = list(judge_speed(even))
    assert [finding.level for finding in findings] == [OK] * 3
    assert findings[1].found == "100 us for 1 KiB, bus bandwidth 1.00 GB/s (10 us a hop)"
    assert findings[2].subject == "links between hosts"


def test_a_slow_rank_is_named_with_its_host() -> None:
    slow = report({(0, 1): 1e9, (0, 2): 1e9, (1, 2): 1e9}, (1.0, 2.0, 1.0), "aab")
    finding = next(iter(judge_speed(slow)))
    assert finding.level == WARN and "rank 1 (host a) takes 2.0 times as long" in finding.found
    assert "nvidia-smi" in finding.remedy


def test_of_two_hosts_the_slow_one_is_named() -> None:
    finding = next(iter(judge_speed(report({(0, 1): 1e9}, (1.0, 1.6), "ab"))))
    assert finding.level == WARN and "rank 1 (host b) takes 1.6 times as long" in finding.found


def test_host_with_slow_interface_is_named_not_links() -> None:
    slow = report({(0, 1): 1e9, (0, 2): 1e8, (1, 2): 1e8}, (1.0, 1.0, 1.0), "abc")
    finding = list(judge_speed(slow))[-1]
    assert finding.level == WARN
    assert finding.found.endswith("; rank 2 (host c) reaches 100.0 MB/s at most")
    assert "ethtool" in finding.remedy


def test_a_slow_link_between_fast_ranks_is_named() -> None:
    rates = {(0, 1): 1e9, (0, 2): 1e9, (1, 2): 1e8}
    finding = list(judge_speed(report(rates, (1.0, 1.0, 1.0), "abc")))[-1]
    assert finding.level == WARN
    assert finding.found.endswith("; rank 1 (host b) to rank 2 (host c) carries 100.0 MB/s")


def test_links_are_compared_with_those_of_their_kind() -> None:
    rates = {(0, 1): 1e11, (0, 2): 1e9, (0, 3): 1e9, (1, 2): 1e9, (1, 3): 1e9, (2, 3): 1e11}
    findings = list(judge_speed(report(rates, (1.0,) * 4, "aabb")))
    assert [finding.level for finding in findings] == [OK] * 4
    assert [finding.subject for finding in findings[2:]] == [
        "links within hosts",
        "links between hosts",
    ]


def test_table_has_line_per_size_link_and_rank() -> None:
    lines = list(table(report({(0, 1): 1e9}, (1.0, 1.0), "ab")))
    assert lines[0] == "2 ranks, cpu"
    assert [line.split()[0:2] for line in lines[2:4]] == [["1", "KiB"], ["1", "MiB"]]
    assert "0 - 1" in lines[5] and lines[5].endswith("a - b")
    assert len(lines) == 9

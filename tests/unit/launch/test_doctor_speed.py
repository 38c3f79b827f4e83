"""What is said of measured hosts."""

from ppdist.launch.doctor import OK, WARN, format_table, judge_speed

SIZES = [
    {
        "bytes": size,
        "seconds": 1e-4,
        "algorithm_bytes_per_second": 1e7,
        "bus_bytes_per_second": 1e7,
    }
    for size in (1024, 1 << 20)
]
REPORT = {
    "world": 2,
    "hosts": ["a", "b"],
    "device": "cpu",
    "latency_seconds": 1e-5,
    "bandwidth_bytes_per_second": 1e9,
    "sizes": SIZES,
    "differences": [],
}


def test_what_differs_between_hosts_is_a_warning() -> None:
    assert [finding.level for finding in judge_speed(REPORT)] == [OK, OK]
    differ = {**REPORT, "differences": ["MTU: 9000 on rank 0 (host a); 1500 on rank 1 (host b)"]}
    assert [finding.level for finding in judge_speed(differ)] == [OK, WARN]
    assert len(list(judge_speed({**REPORT, "hosts": ["a", "a"]}))) == 1


def test_table_has_a_line_for_each_size() -> None:
    assert len(list(format_table(REPORT))) == 2 + len(SIZES)

"""What several hosts say when a rank of one hangs, or the network is away for a while."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.unit.launch.hosts import Host, hosts_of_a_test, wait_for, write
from tests.unit.launch.namespaces import A, B, Cable, ended, ip

pytestmark = pytest.mark.slow
NEAR, FAR = "127.0.0.2", "127.0.0.3"
TRAINING = """
import paddle
from ppdist.distributed import comm, heartbeat
from ppdist.config.distributed import DistributedConfig
def main():
    comm.init("cpu", DistributedConfig())
    Path(f"pid{rank}").write_text(str(os.getpid()))
    total = 0.0
    for step in range(int(sys.argv[1])):
        heartbeat.beat("step", step)
        time.sleep(0.1)
        total += comm.all_reduce_sum(paddle.to_tensor([1.0])).item()
        Path(f"step{rank}").write_text(str(step))
    heartbeat.beat("end")
    print("total", total, flush=True)
run(main)
"""


def step(rank: int) -> int:
    path = Path(f"step{rank}")
    return int(path.read_text() or 0) if path.is_file() else 0


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_on_all_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: int, record_property
) -> None:
    monkeypatch.chdir(tmp_path)
    script, port = write(TRAINING), str(free_port())
    with hosts_of_a_test() as begin:

        def host(own: str) -> Host:
            words = ("--ips", f"{NEAR},{FAR}", "--host", own, "--start_port", port)
            return begin(own, *words, "--nproc_per_node", "1", script, "100000")

        hosts = [host(NEAR), host(FAR)]
        wait_for(lambda: step(0) > 5 and step(1) > 5)
        pid = int(Path(f"pid{stopped}").read_text())
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        ends = ended(hosts, 150)
    record_property("seconds until all hosts had ended", round(time.monotonic() - began, 1))
    print(f"all hosts ended {time.monotonic() - began:.1f} s after SIGSTOP", ends[1].errors)
    for end in ends:
        assert end.code == 1
        assert f"rank {stopped} (host " in end.errors and f", pid {pid})" in end.errors
        assert "stopped (SIGSTOP), in " in end.errors
        assert "No host knows" not in end.errors


def test_a_network_away_for_20_seconds_is_survived(
    cable: Cable, cabled: Callable[..., Host], record_property
) -> None:
    script = write(TRAINING)
    steps = 100
    words = ("--nproc_per_node", "1", script, str(steps))
    hosts = [cabled(A, *words), cabled(B, *words)]
    wait_for(lambda: step(0) > 5 and step(1) > 5)
    cable.pull()
    time.sleep(20)
    assert step(0) < steps - 1
    before = step(0)
    ip("-n", cable.namespaces[1], "link", "set", "cable1", "up")
    began = time.monotonic()
    wait_for(lambda: step(0) > before + 1, 60)
    record_property("seconds from the cable to the next step", round(time.monotonic() - began, 1))
    print(f"{time.monotonic() - began:.1f} s from the cable to the next step")
    one, other = ended(hosts, 100)
    assert (one.code, other.code) == (0, 0), one.errors + other.errors
    assert one.output == other.output == f"total {2.0 * steps}\n"

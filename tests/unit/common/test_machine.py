"""What a process may use of its machine, on machines that are made up."""

import os
from pathlib import Path

import pytest

from ppdist.common.machine import (
    available_cores,
    available_memory,
    existing_folder,
    free_disk,
    given_threads,
)


def fake_machine(root, files: dict[str, str]):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n", encoding="utf-8")
    return root


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "max 100000",
         "sys/fs/cgroup/a/cpu.max": "50000 100000"},
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"},
        {"proc/self/cgroup": "4:cpu,cpuacct:/docker/1234",  # the host's path, in a container
         "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000",
         "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000"},
    ],
    ids=["v2, of a group above", "v2, in a container", "v1, in a container"],
)  # fmt: skip
def test_a_quota_of_half_a_core_is_seen(tmp_path, files):
    assert available_cores(fake_machine(tmp_path, files)) == 0.5


@pytest.mark.parametrize("quota", ["-1", "max 100000", ""])
def test_without_a_quota_the_affinity_counts(tmp_path, quota):
    files = {
        "proc/self/cgroup": "4:cpu:/\n0::/",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": quota,
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu.max": quota,
    }
    assert available_cores(fake_machine(tmp_path, files)) == len(os.sched_getaffinity(0))
    assert available_cores(tmp_path / "no such machine") == len(os.sched_getaffinity(0))


def test_free_memory_is_what_the_container_may_still_use(tmp_path):
    files = {
        "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB",
        "proc/self/cgroup": "0::/pod",
        "sys/fs/cgroup/pod/memory.max": "4096000",
        "sys/fs/cgroup/pod/memory.current": "3000000",
        "sys/fs/cgroup/pod/memory.stat": "anon 5\ninactive_file 500000",
    }
    assert available_memory(fake_machine(tmp_path, files)) == 4096000 - 3000000 + 500000
    (tmp_path / "sys/fs/cgroup/pod/memory.max").write_text("max\n", encoding="utf-8")
    assert available_memory(tmp_path) == 8000 * 1024
    assert 0 < available_memory() < 2**50


def test_absent_path_is_where_its_folder_is(tmp_path: Path) -> None:
    assert existing_folder(tmp_path / "not" / "yet") == tmp_path
    assert existing_folder(tmp_path) == tmp_path
    assert free_disk(tmp_path / "not" / "yet") > 0


@pytest.mark.parametrize(
    ("began_with", "now", "given"),
    [
        ("PATH=/bin\0", "1", None),  # Paddle's own
        ("PATH=/bin\0OMP_NUM_THREADS=1\0", "1", 1),
        ("PATH=/bin\0", "4", 4),  # set by this process before Paddle came
        ("PATH=/bin\0", "", None),
    ],
)
def test_of_one_thread_counts_what_the_process_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, began_with: str, now: str, given: int | None
) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "environ").write_text(began_with)
    monkeypatch.setenv("OMP_NUM_THREADS", now)
    assert given_threads(tmp_path) == given

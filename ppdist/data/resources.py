"""Cores and memory that affinity, containers and ranks leave us.

A container usually sees all cores and all memory of its host; what it may use of them stands in its
control group (kernel documentation: admin-guide/cgroup-v2, cgroup-v1/memory, scheduler/sched-bwc).
"""

import logging
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from ppdist.distributed import comm

_LOGGER = logging.getLogger("ppdist.data")
_MOST_WORKERS = 16  # more than 2,000 images a second: no card of today learns from as many
_CORES_PER_WORKER_ON_CPU = 4  # a worker prepares as many images as four cores learn from, and more
_UNLIMITED = 2**60  # bytes; cgroup v1 says "no limit" with a number of about 2**63


@cache  # one line, not one for each loader
def worker_count(wanted: int | Literal["auto"], ranks_on_host: int) -> int:
    """Processes that prepare images for one rank; a line says how many, and why.

    Automatic: with a GPU all cores but the one of each rank, at most 16; without one the
    cores are needed for training itself, and a fourth of them, at most 4, keep it busy.

    Args:
        wanted: `data.workers`; a number is taken as it is.
        ranks_on_host: ranks that share this machine, this one included.
    """
    cores = available_cores()
    share = cores / max(1, ranks_on_host)
    of = f"{cores:.3g} cores" + (f" for {ranks_on_host} ranks" if ranks_on_host > 1 else "")
    if wanted == "auto":
        count, why = _automatic(share, comm.on_gpu())
        _LOGGER.info("data.workers: auto is %d per rank: %s, %s", count, of, why)
        return count
    if wanted > max(1, share):
        _LOGGER.warning(
            "data.workers: %d per rank are more than %s can run at once; auto would choose %d",
            wanted, of, _automatic(share, comm.on_gpu())[0],
        )  # fmt: skip
    return wanted


def _automatic(share: float, gpu: bool) -> tuple[int, str]:
    """(workers, why) of a rank that has so many cores."""
    if gpu:
        count = min(_MOST_WORKERS, max(1, int(share) - 1))
        return count, "one for the rank itself"
    count = min(4, max(1, int(share / _CORES_PER_WORKER_ON_CPU)))
    return count, "most of them needed for training, which has no GPU"


def available_cores(root: Path = Path("/")) -> float:
    """Cores this process may keep busy: the least of its affinity and the quotas of its groups.

    Args:
        root: where `proc` and `sys` are.
    """
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _group_folders(root, "cpu"):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if not quota:
            quota = _text(folder / "cpu.cfs_quota_us")
            period = _text(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
            cores = min(cores, int(quota) / int(period))
    return cores


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that can be taken without pushing anything out: the least of what the machine
    has free and what the groups of this process may still use.

    Args:
        root: where `proc` and `sys` are.
    """
    lines = dict(line.split(":") for line in _text(root / "proc/meminfo").splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    for folder in _group_folders(root, "memory"):
        limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
        used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes")
        if limit.isdecimal() and used.isdecimal() and int(limit) < _UNLIMITED:
            free = min(free, int(limit) - int(used) + _file_pages(folder))
    return max(0, free)


def _file_pages(folder: Path) -> int:
    """Bytes of a group's usage that are copies of files, given up when memory is short."""
    counts = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
    names = ("total_inactive_file", "inactive_file")  # v1, where the plain one leaves groups out
    return next((int(counts[name]) for name in names if name in counts), 0)


def _group_folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the control groups that this process is in, from its own up to the outermost.

    Inside a container the path in /proc/self/cgroup is often that of the host, while the mounted
    tree begins at the container's own group; then only its top exists.
    """
    mounts = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        tops = {mounts / controllers, mounts / controller} if controllers else {mounts}
        for top in tops:
            own = top / path.strip("/")
            yield from (f for f in (own, *own.parents) if f.is_relative_to(top) and f.is_dir())


def _text(file: Path) -> str:
    """What a file of the kernel says; nothing where there is none."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""

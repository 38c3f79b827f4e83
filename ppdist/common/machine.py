"""Cores, memory and disk that this process may use, and which processes live.

A container usually sees all cores and all memory of its host; its limits are in its
control group (kernel documentation: admin-guide/cgroup-v2, cgroup-v1/memory, scheduler/sched-bwc).
"""

import difflib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 2**60  # bytes; cgroup v1 says "no limit" with a number of about 2**63


def available_cores(root: Path = Path("/")) -> float:
    """Returns the cores this process may use: the minimum of affinity and cgroup quotas.

    Args:
        root: where `proc` and `sys` are.
    """
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _group_folders(root, "cpu"):
        quota, _, period = kernel_text(folder / "cpu.max").partition(" ")
        if not quota:
            quota = kernel_text(folder / "cpu.cfs_quota_us")
            period = kernel_text(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
            cores = min(cores, int(quota) / int(period))
    return cores


def given_threads(root: Path = Path("/")) -> int | None:
    """Returns OMP_NUM_THREADS as it was given to this process; None if it was not set.

    Paddle sets an unset variable to 1 when it is imported, so a value of 1 counts only if this
    process began with it.

    Args:
        root: where `proc` is.
    """
    present = os.environ.get("OMP_NUM_THREADS", "")
    original = kernel_text(root / "proc/self/environ").split("\0")
    if present == "1" and not any(variable.startswith("OMP_NUM_THREADS=") for variable in original):
        return None
    return int(present) if present.isdecimal() else None


def available_memory(root: Path = Path("/")) -> int:
    """Returns the bytes of memory available without evicting anything.

    That is the minimum of the machine's free memory and of what the control groups of this process
    may still use.

    Args:
        root: where `proc` and `sys` are.
    """
    lines = dict(line.split(":") for line in kernel_text(root / "proc/meminfo").splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    for folder in _group_folders(root, "memory"):
        # The file of cgroup version 2, or else of version 1.
        limit, used = (
            kernel_text(folder / new) or kernel_text(folder / old)
            for new, old in (
                ("memory.max", "memory.limit_in_bytes"),
                ("memory.current", "memory.usage_in_bytes"),
            )
        )
        if limit.isdecimal() and used.isdecimal() and int(limit) < _UNLIMITED:
            free = min(free, int(limit) - int(used) + _file_pages(folder))
    return max(0, free)


def process_memory() -> dict[str, int]:
    """Reads the memory of this process in bytes, by Linux's names.

    These are VmRSS, VmHWM (its peak), VmSize, VmPeak, ...
    """
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    pairs = [line.partition(":") for line in lines if line.startswith("Vm")]
    return {name: int(value.split()[0]) * 1024 for name, _, value in pairs}


def free_disk(path: str | Path) -> int:
    """Returns the free bytes on the disk where a path is, or will be."""
    return shutil.disk_usage(existing_folder(path)).free


def suggest_path(path: Path) -> str:
    """Suggests a similar name in a missing path's folder: `did you mean a/b?`, or ""."""
    siblings = [file.name for file in path.parent.glob("*")] if not path.exists() else []
    near = difflib.get_close_matches(path.name, siblings, 1)
    return f"did you mean {path.with_name(near[0])}?" if near else ""


def existing_folder(path: str | Path) -> Path:
    """Returns the path itself, or its nearest existing parent."""
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _file_pages(folder: Path) -> int:
    """Returns the bytes of page cache in a group's usage, reclaimed under memory pressure."""
    counts = dict(line.split() for line in kernel_text(folder / "memory.stat").splitlines())
    # In version 1 the second name leaves out the inner groups.
    names = ("total_inactive_file", "inactive_file")
    return next((int(counts[name]) for name in names if name in counts), 0)


def _group_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yields the folders of this process's control groups, from its own to the outermost.

    Inside a container the path in /proc/self/cgroup is often that of the host, while the mounted
    tree begins at the container's own group; then only its top exists.
    """
    mounts = root / "sys/fs/cgroup"
    for line in kernel_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        tops = {mounts / controllers, mounts / controller} if controllers else {mounts}
        for top in tops:
            group = top / path.strip("/")
            yield from (
                folder
                for folder in (group, *group.parents)
                if folder.is_relative_to(top) and folder.is_dir()
            )


def kernel_text(file: Path) -> str:
    """Reads a kernel file; "" if it is absent or unreadable.

    Reading may fail, for example because a device does not answer.
    """
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class ProcessStat:
    """The state of a process in /proc/PID/stat, see proc(5)."""

    state: str  # such as R: it runs, T: stopped, Z: a zombie
    parent: int  # process id
    began: int  # in ticks since boot; it identifies the process, as ids are reused
    cpu_seconds: float  # so far

    @property
    def is_alive(self) -> bool:
        """Returns False for a zombie, which has ended but was not reaped."""
        return self.state not in ("Z", "X")


def process_stat(pid: int) -> ProcessStat | None:
    """Reads the state of a process; None: there is no such process, or no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The name of the program comes before, in brackets, and may hold any character.
    fields = text.rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ProcessStat(fields[0], int(fields[1]), int(fields[19]), ticks / os.sysconf("SC_CLK_TCK"))


def is_alive(pid: int) -> bool:
    """Returns True if a process is running; a zombie is not."""
    stat = process_stat(pid)
    return stat is not None and stat.is_alive

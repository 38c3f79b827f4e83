"""Measures the speed of a cluster: all-reduce by message size.

`ppdist doctor` runs this on every rank after it has compared the ranks.  The code paths for GPUs
have not been run on a GPU.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
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
_SIZE_SECONDS = 0.2  # target time for repeats of each size, 3 to 20 of them
_LONGEST_SECONDS = 4.0  # larger messages are not tried: gloo gives up after 30 s


def check_ranks(config: ExperimentConfig | None) -> list[str]:
    """Joins the other ranks and compares software, settings and data.

    Collective.

    Args: config: configuration of the experiment; None checks only what every run needs.
    Returns: warnings.
    Raises: UserError, on every rank: the ranks differ, an all-reduce fails, or the data are wrong.
    """
    with within(_STAGE_SECONDS, "joining the other ranks"):
        wanted_device = config.device if config else "auto"
        comm.init(wanted_device, config.distributed if config else DistributedConfig())
    # Without an experiment there are no data sets to compare.
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
    """Measures the cluster; returns plain data, the same on every rank.  Collective, after
    `check_ranks`.

    Returns: `sizes` from `measure_all_reduce`, and the parameters of the ring model
        t = 2 (n-1) latency + 2 (n-1)/n bytes / bandwidth, fitted to the smallest and largest sizes:
        `latency_seconds` from the smallest message, `bandwidth_bytes_per_second` (the bus
        bandwidth) from the largest.  Both are None with one rank.
    """
    world = comm.world_size()
    hosts_W = comm.all_gather_object(comm.host())
    report: Report = {"world": world, "hosts": hosts_W, "device": paddle.device.get_device()}
    report["sizes"] = list(measure_all_reduce()) if world > 1 else []
    report["latency_seconds"] = report["bandwidth_bytes_per_second"] = None
    if world > 1:
        # The smallest message is taken to cost only latency, the largest only bandwidth.
        report["latency_seconds"] = report["sizes"][0]["seconds"] / (2 * (world - 1))
        report["bandwidth_bytes_per_second"] = report["sizes"][-1]["bus_bytes_per_second"]
    return report


def compare_hosts(facts: dict[str, str]) -> Report:
    """Lists differences between hosts other than software; the result is equal on every rank.

    Collective.

    Args: facts: facts about this host, by name (ppdist/launch/doctor.py).
    Returns: `differences`, a line for each fact that is not the same everywhere.
    """
    hosts_W = comm.all_gather_object(comm.host())
    return {"differences": list(differences(comm.all_gather_object(facts), hosts_W))}


def measure_all_reduce() -> Iterator[Report]:
    """Yields `seconds` and two bandwidths for an all-reduce of each size.

    `seconds` is the median over repeats, on the slowest rank.  The bandwidths with n ranks are
    those defined by nccl-tests (NVIDIA/nccl-tests, doc/PERFORMANCE.md): algorithm bandwidth is
    bytes / seconds; bus bandwidth is that times 2 (n-1)/n, the load of each rank's link for any n.
    Ends early if the next size would take too long.
    """
    factor = 2 * (comm.world_size() - 1) / comm.world_size()
    for size in SIZES:
        with within(_STAGE_SECONDS, f"an all-reduce of {size} bytes"):
            values = paddle.zeros([size // 4])
            work = partial(comm.all_reduce_sum, values)
            # The first run may include one-time work; it only determines the number of repeats.
            first = max(gather_values(time_work(work)))
            count = min(20, max(3, int(_SIZE_SECONDS / first)))  # the same on every rank
            local_seconds = median(time_work(work) for _ in range(count))
            seconds = max(gather_values(local_seconds))
        rate = size / seconds
        yield {
            "bytes": size,
            "seconds": seconds,
            "algorithm_bytes_per_second": rate,
            "bus_bytes_per_second": factor * rate,
        }
        if 4 * seconds > _LONGEST_SECONDS:
            return


def time_work(work: Callable[[], Any]) -> float:
    """Times the work, including its part on the GPU."""
    began = time.perf_counter()
    work()
    device.synchronize()
    return time.perf_counter() - began


def gather_values(value: float) -> list[float]:
    return comm.all_gather(paddle.to_tensor([value], dtype="float32"))[:, 0].tolist()

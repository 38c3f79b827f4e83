"""The wrapper around paddle.distributed: the same code runs on one rank or many.

Ranks communicate in two ways, and every rank must reach both:

* collectives (gradients, statistics): fast, but gloo gives up after 30 s whatever is configured;
  in the shared memory of a host (shm_allreduce.py) they wait as long as barriers do;
* barriers at the TCP store (`barrier`, `run_on_main`, `run_on_all_ranks`): slow (tens of ms), for
  the places where ranks may be minutes apart: evaluation, checkpoints, start-up.

Work that may fail on one rank is run in a way that lets all ranks learn of the failure.  On one
process every function is the identity or a plain call, so callers never check.  Also here: how
glibc keeps the memory of tensors on the CPU.
"""

import contextlib
import ctypes
import io
import math
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar, cast

from paddle import distributed as pd
from paddle.distributed import fleet

from ppdist.common.child import COPIES_VARIABLES
from ppdist.common.errors import (
    CodedError,
    Failure,
    LaunchError,
    StorageError,
    UserError,
    failure_of,
)
from ppdist.config.distributed import DistributedConfig
from ppdist.distributed import device, heartbeat, paddle_api
from ppdist.distributed.agreement import require_agreement
from ppdist.distributed.collectives import all_gather as all_gather
from ppdist.distributed.collectives import all_reduce_sum as all_reduce_sum
from ppdist.distributed.collectives import broadcast_tensors as broadcast_tensors
from ppdist.distributed.collectives import routes
from ppdist.distributed.gathering import all_gather_large_object as all_gather_large_object
from ppdist.distributed.gathering import all_gather_rows as all_gather_rows
from ppdist.distributed.ranks import addresses as addresses
from ppdist.distributed.ranks import host as host
from ppdist.distributed.ranks import is_main as is_main
from ppdist.distributed.ranks import local_rank as local_rank
from ppdist.distributed.ranks import local_size as local_size
from ppdist.distributed.ranks import rank as rank
from ppdist.distributed.ranks import ranks_named as ranks_named
from ppdist.distributed.ranks import world_size as world_size
from ppdist.distributed.shm_allreduce import MESSAGE_MB, join
from ppdist.distributed.store import alive as alive
from ppdist.distributed.store import all_gather_object as all_gather_object
from ppdist.distributed.store import announce_arrival as announce_arrival
from ppdist.distributed.store import barrier as barrier
from ppdist.distributed.store import once_there as once_there
from ppdist.distributed.store import (
    require_connectivity,
    separate_store,
    set_timeout,
)
from ppdist.distributed.store import run_on_all_ranks as run_on_all_ranks
from ppdist.distributed.store import run_on_main as run_on_main
from ppdist.distributed.store import storage_seconds as storage_seconds
from ppdist.distributed.store import was_restarted as was_restarted

_GLOO_SECONDS = 30.0  # gloo gives up after this time, whatever is configured
_hang_seconds = math.inf


def init(requested: str, config: DistributedConfig) -> None:
    """Chooses the device and joins the other ranks, before any tensor.  Collective.

    Args: requested: see `device.choose`.
    Raises: ConfigError: the device cannot be used, or ranks would join in different ways.
        LaunchError: hosts cannot reach one another, or as in `require_own_ranks`.
    """
    global _hang_seconds
    require_own_ranks(os.environ)
    _hang_seconds = math.inf if config.hang_seconds is None else config.hang_seconds
    heartbeat.begin(config.timeout_seconds, config.hang_seconds)
    set_timeout(config.timeout_seconds)
    if world_size() > 1 or signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        # Paddle has installed a handler of its own below Python's handler.  It prints a page about
        # a "FatalError", and Python's handler does not run while Paddle waits for other ranks.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    kind = run_on_all_ranks(lambda: device.choose(requested))
    if world_size() > 1:
        settings = {f"distributed.{key}": f"{value}" for key, value in config.model_dump().items()}
        require_agreement({"start": {"device": kind} | settings})
        require_connectivity(all_gather_object, addresses(), rank(), os.environ)
        _join()
        if kind == device.CPU:
            _share_memory(config)
        routes.bucket_mb = config.bucket_mb
        paddle_api.set_fleet_bucket(config.bucket_mb)
        if routes.memory is not None:
            routes.memory.message_bytes = min(config.bucket_mb << 20, routes.memory.longest)


def require_own_ranks(environment: Mapping[str, str]) -> None:
    """Checks that this process is not one of several copies started without a Paddle launcher.

    Each would train alone, or wait for ranks that never come.  Clusters that set WORLD_SIZE per
    machine do not set LOCAL_RANK: there, one process is one rank.

    Raises: LaunchError: this process is such a copy.
    """
    _refuse_cluster_variables(environment)
    if "PADDLE_TRAINERS_NUM" in environment:
        return
    for size, (launcher, rank_variables, on_host) in _FOREIGN_LAUNCHERS.items():
        count = environment.get(size, "")
        if not count.isdecimal() or int(count) < 2 or not {*rank_variables} <= environment.keys():
            continue
        if launcher == "srun" and "SLURM_PTY_PORT" in environment:
            # This is an interactive shell in an allocation: the other tasks of this Slurm step have
            # ended.
            continue
        processes = (re.findall(r"^\d+", environment.get(on_host, "")) or [count])[
            0
        ]  # Slurm: 2(x4)
        raise LaunchError(
            f"another launcher started this process as one of {count}; each would work on its own",
            code="foreign_launcher",
            where=" ".join(f"{name}={environment[name]}" for name in (size, rank_variables[0])),
            fix=f"use fleetrun instead of {launcher}: `fleetrun --nproc_per_node {processes} "
            "ppdist ...` (several hosts: docs/clusters.md); for processes that do not belong "
            f"together: `env -u {size} ppdist ...`",
        )


# Variable with the number of copies of a command -> the program that starts them, the variables
# that each copy has, and the variable with the number of copies on a host.  SLURM_NTASKS alone
# means an interactive job without copies.
_FOREIGN_LAUNCHERS = dict(
    zip(
        COPIES_VARIABLES,
        (
            ("torchrun", ("RANK", "LOCAL_RANK"), "LOCAL_WORLD_SIZE"),
            ("srun", ("SLURM_PROCID",), "SLURM_STEP_TASKS_PER_NODE"),
            ("mpirun", ("OMPI_COMM_WORLD_RANK",), "OMPI_COMM_WORLD_LOCAL_SIZE"),
            ("mpirun", ("PMI_RANK",), "MPI_LOCALNRANKS"),
        ),
        strict=True,
    )
)
_CLUSTER_VARIABLES = (
    *("PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ID", "PADDLE_TRAINER_ENDPOINTS"),
    *("PADDLE_CURRENT_ENDPOINT", "PADDLE_NNODES", "PADDLE_MASTER"),
)


def _refuse_cluster_variables(environment: Mapping[str, str]) -> None:
    """Rejects variables that a cluster sets for Paddle's launcher if no launcher has run.

    Every launcher, and paddle.distributed.spawn, also sets variables with the address where the
    ranks meet or the cards they use.

    Raises: LaunchError `environment_of_other_launch`: only the cluster's variables are set.
    """
    ranks, hosts = (
        int(value) if (value := environment.get(name, "")).isdecimal() else 1
        for name in ("PADDLE_TRAINERS_NUM", "PADDLE_NNODES")
    )
    if "PADDLE_TRAINERS_NUM" in environment:
        launcher_variables = {"PADDLE_MASTER", "PADDLE_RANK_IN_NODE", "PADDLE_DISTRI_BACKEND"}
        is_launched = bool(launcher_variables & environment.keys())
        if (
            is_launched
            or ranks < 2
            or any(key.startswith("FLAGS_selected_") for key in environment)
        ):
            return
    elif hosts < 2:
        return
    variables = [name for name in _CLUSTER_VARIABLES if name in environment]
    endpoints = environment.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")
    ips = [*dict.fromkeys(endpoint.rpartition(":")[0] or "HOST1,HOST2" for endpoint in endpoints)]
    if len(ips) == 1 and len(endpoints) > 1:
        launch = f"`fleetrun --nproc_per_node {ranks} ppdist ...`"
    else:
        launch = f"`fleetrun --ips {','.join(ips)} ppdist ...` on every host"
    raise LaunchError(
        f"the environment says that this is one of {max(ranks, hosts)} processes or hosts, and no "
        "launcher started it: it would wait for the others, or train alone",
        code="environment_of_other_launch",
        where=" ".join(f"{name}={environment[name]}" for name in variables[:3]),
        fix=f"`unset {' '.join(variables)}`; then {launch} for one training, or the "
        "same command as now for this process alone",
    )


def step_storage_seconds() -> float:
    """Returns how long a rank waits for unreachable storage during training, in seconds.

    Within a host the other ranks wait as long as at a barrier.  Between hosts, gloo or a fleetrun
    whose ranks all wait for other hosts (launch/watchdog.py) gives up earlier.
    """
    if world_size() == local_size():
        return storage_seconds()
    peer_seconds = 2 * _hang_seconds if device.on_accelerator() else _GLOO_SECONDS
    return min(storage_seconds(), peer_seconds / 2)


def _join() -> None:
    """Initializes fleet, without the pages of text that Paddle prints."""
    paddle_api.quiet_fleet()
    strategy = fleet.DistributedStrategy()
    # Every loss stays connected to every head, so no parameter is unused.
    strategy.find_unused_parameters = False
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _one_communicator():
            fleet.init(is_collective=True, strategy=strategy, log_level="WARNING")


@contextlib.contextmanager
def _one_communicator() -> Iterator[None]:
    """Lets fleet, inside the block, use the default group as the group of all ranks.

    Fleet creates a group for every kind of parallelism, and in plain data parallelism one of these
    groups again contains all ranks.  Over gloo its members may read the addresses of the first
    group (16 of 40 starts with three and four ranks ended in a refused connection), and two NCCL
    communicators in use from two streams may wait for each other.
    """
    original = pd.new_group

    def new_group(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        if ranks is None or len(ranks) == world_size():
            return paddle_api.default_group()
        return original(ranks, *args, **kwargs)

    pd.new_group = new_group
    try:
        yield
    finally:
        pd.new_group = original


def _share_memory(config: DistributedConfig) -> None:
    """Lets the ranks of each host sum tensors in shared memory.  Collective."""
    firsts_W = all_gather_object(rank() - local_rank())
    routes.memory = join(
        all_gather_object,
        rank=rank(),
        firsts_W=firsts_W,
        message_bytes=min(config.bucket_mb, MESSAGE_MB) << 20,
        timeout_seconds=config.timeout_seconds,
    )
    leaders = sorted(set(firsts_W))
    if routes.memory is not None and len(leaders) > 1:
        with separate_store(leaders):
            routes.leaders = pd.new_group(leaders)


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_PAD_BYTES = 64 << 20


def keep_freed_memory() -> None:
    """Keeps freed CPU memory for the next tensors.

    Every step frees what it has allocated.  By default glibc returns most of it, and the kernel
    has to zero and map the same pages again, page fault by page fault, in the next step.  The
    process keeps the memory of its largest step, which the next step needs anyway.  Memory left
    over from reading the data is first returned to the system, so call this after the data are
    read.
    """
    if sys.platform != "linux" or device.on_accelerator():
        return
    library = ctypes.CDLL(None)
    mallopt = getattr(library, "mallopt", None)  # musl has none
    if mallopt is not None:
        library.malloc_trim(0)
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, ctypes.c_int(-1))
        mallopt(_M_TOP_PAD, _PAD_BYTES)


T = TypeVar("T")


@dataclass
class OnAllRanks(Generic[T]):
    """The result of work that all ranks have done."""

    value: T  # what `work` returned on this rank
    said_W: list[Any]  # what `say` returned for each rank's value


class EvaluationFailed(CodedError, RuntimeError):
    """The error raised on every rank if an evaluation failed on some; training is unaffected."""

    kind = "evaluation"


def evaluate_on_all_ranks(
    work: Callable[[], T], say: Callable[[T], Any] = lambda value: None
) -> OnAllRanks[T]:
    """Runs `work` on all ranks; returns its result on this one if none failed.  Collective.

    Args: say: computes from the result a value for the other ranks; it must be JSON-serializable.
    Raises: EvaluationFailed, on every rank: `work` failed on some ranks, not only with user errors.
        UserError, on every rank: it failed with user errors only.  StorageError, on every rank:
        storage stayed unreachable on some ranks, so that later work would fail as well.
    """
    value, failure, report, summary = None, None, None, None
    try:
        value = work()
        summary = say(value)
    except Exception as error:
        failure = error
        text = f"rank {rank()} (host {host()}): {type(error).__name__}: {error}"
        failure_for_peers = failure_of(error).of_rank(rank(), host())
        report = [isinstance(error, UserError), text, asdict(failure_for_peers)]
    reports_W = all_gather_object([report, summary])
    failed = [rank_report for rank_report, _ in reports_W if rank_report]
    if not failed:
        return OnAllRanks(cast(T, value), [rank_summary for _, rank_summary in reports_W])
    storage_failures = [fields for _, _, fields in failed if fields["kind"] == StorageError.kind]
    if storage_failures:
        if isinstance(failure, StorageError):
            raise failure
        raise Failure(**storage_failures[0]).error()
    first = Failure(**failed[0][2])
    if all(is_users for is_users, _, _ in failed):
        raise failure or first.error()
    message = "; ".join(text for _, text, _ in failed)
    evaluation_error = EvaluationFailed(message, code="evaluation_failed")
    evaluation_error.from_rank = None if failure else first.from_rank
    raise evaluation_error from failure

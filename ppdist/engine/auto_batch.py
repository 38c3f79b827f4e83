"""Auto batch: the largest micro-batch that memory allows, by trial.

`train.batch_size_per_card: auto` (`resolve_batch_size`): each rank trains with a few batches in a
process of its own (`memory_probe`), so whatever ends it ends no run: the kernel's out-of-memory
killer, a limit, oneDNN without memory for its buffers.  All ranks then take the smallest result.  A
resumed run keeps its micro-batches and searches nothing.  If memory runs out later, training
continues with smaller micro-batches (policies/memory.py).

Three kinds of memory run out separately, and each is counted by itself, in bytes: the memory of the
host, which its ranks share; the address space of a process (`ulimit -v`), where that is limited;
and the memory of a card.
"""

import json
import math
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from ppdist.common.child import own_environment, python_module, run_command
from ppdist.common.errors import ConfigError, Failure
from ppdist.common.machine import available_memory, process_memory
from ppdist.config.augment import AugmentConfig
from ppdist.config.experiment import ExperimentConfig
from ppdist.config.train import MicroBatches, max_micro_batch
from ppdist.data.transforms.mix import MOSAIC_IMAGES
from ppdist.data.types import ImageRecord
from ppdist.distributed import comm, device, heartbeat
from ppdist.engine.resume import Start, resumed_micro_batches

HOST, ADDRESSES, CARD = "memory of the host", "address space (ulimit -v)", "memory of the card"
Bytes = Mapping[str, int]  # by kind of memory
# (batch -> bytes it used, by kind of memory; why a requested batch was not measured, with a remedy,
# or "")
Outcome = tuple[dict[int, dict[str, int]], str]
MISTAKE, NO_MEMORY = 2, 3  # exit codes of `memory_probe`
_DRAWS = 10_000  # random draws of the images that are combined into one
_MEMORY_SHARE = 0.8  # of free memory; loaders and evaluation need the rest
_SEARCH_SHARE = 0.5  # of distributed.timeout_seconds
_WORTH_A_TRIAL = 8  # a trial costs a process: only for at least an eighth more images
_TAIL = 600  # characters at the end of the probe's output that a message quotes
_SMALLER = "lower model.image_size (or train.multi_scale), take a smaller model, or give a number"
_LATE = (
    "training with it took longer than half of distributed.timeout_seconds; give a number, or "
    "raise that"
)


def resolve_batch_size(
    config: ExperimentConfig, records: Sequence[ImageRecord], images: int, start: Start
) -> tuple[ExperimentConfig, MicroBatches, list[str]]:
    """Replaces a batch size of `auto`, or one larger than the set, with a number.  Collective.

    Called before anything large is built, because the trials need the memory.

    Args:
        records: the training images.
        images: samples of an epoch over all ranks.
        start: where the run starts; a resumed run keeps its micro-batches.
    Returns: the configuration, the same on every rank; the micro-batches per step; lines for the
    log.
    Raises: UserError, on every rank: not even one image fits on some rank, the run could not be
        built, the total batch cannot be reached, or a resumed run would get different
        micro-batches.
    """
    train, world = config.train, comm.world_size()
    # With a larger micro-batch, a step would need more images than the set has.
    whole_set = max_micro_batch(images, world * train.accumulate_steps)
    batch_size = train.batch_size_per_card
    if start.made_of:
        previous_batch = start.made_of["batch_size_per_card"]
        follows = batch_size == "auto" or (batch_size >= whole_set and train.total_batch is None)
        config = _set_batch(config, previous_batch, {}) if follows else config
        batches = resumed_micro_batches(start, config.train, follows)
        where = "in the checkpoint" if start.snapshot else "where this job began"
        changed = follows and batch_size != previous_batch
        notes = [f"{batch_size} is {previous_batch}, as {where}"] if changed else []
    elif batch_size == "auto":
        config, batches, notes = _search_batch_size(config, records, images, whole_set)
    else:
        notes = []
        if batch_size > whole_set and train.total_batch is None:
            notes = [f"{whole_set}, not {batch_size}: the set has {images} images"]
            config = _set_batch(config, whole_set, {})
        batches = config.train.micro_batches(world)
    return config, batches, [f"train.batch_size_per_card: {note}" for note in notes]


def _search_batch_size(
    config: ExperimentConfig, records: Sequence[ImageRecord], images: int, whole_set: int
) -> tuple[ExperimentConfig, MicroBatches, list[str]]:
    """Searches for the batch size of a new run by running trials.  Collective.

    Takes and returns the same as `resolve_batch_size`.

    Args: whole_set: the batch size at which one step uses the whole set.
    """
    train, world = config.train, comm.world_size()
    total = train.total_batch
    max_batch = min(train.auto_batch_most, whole_set if total is None else math.ceil(total / world))
    objects = max_objects([len(record.labels_M) for record in records], config.data.augment)
    # Also a barrier: all ranks read the free memory before any probe allocates some of it.
    limits = comm.run_on_all_ranks(_read_limits)
    deadline = time.monotonic() + _SEARCH_SHARE * config.distributed.timeout_seconds
    trial = trial_of(job_of(config, objects, images), limits, deadline)
    local = comm.run_on_all_ranks(lambda: search(trial, limits, max_batch))
    results_W = comm.all_gather_object([local.images, local.reason, comm.host()])
    smallest = min(rank_batch for rank_batch, *_ in results_W)
    ranks = [rank for rank, (rank_batch, *_) in enumerate(results_W) if rank_batch == smallest]
    batch = smallest if total is None else shared_batch(total, world, smallest, train.sync_bn)
    rank_names = comm.ranks_named(ranks, [host for *_, host in results_W])
    note = f"auto is {batch}: of {rank_names} {results_W[ranks[0]][1]}"
    if batch != smallest:
        note += f"; {batch} suits the {total} images of train.total_batch on {world} ranks"
    config = _set_batch(config, batch, {})
    return config, config.train.micro_batches(world), [note]


def shared_batch(total: int, world: int, max_batch: int, spread: bool) -> int:
    """Finds the largest micro-batch up to `max_batch` that divides a step among ranks.

    The step is divided evenly if possible; otherwise the rank with the most micro-batches takes at
    most an eighth more images than an equal share, or as few as possible.

    Args:
        total: images per step over all ranks.
        spread: each micro-batch is spread over all ranks; the result is then one rank's share.
    """
    if spread:
        counts = [count for count in range(1, total + 1) if total % count == 0]
        shares = (math.ceil(total / count / world) for count in counts)
        return next(share for share in shares if share <= max_batch)
    if total % world == 0:
        return largest_divisor(total // world, max_batch)
    sizes = [size for size in range(1, max(1, min(total, max_batch)) + 1) if total % size == 0]
    slowest = {size: math.ceil(total // size / world) * size for size in sizes}
    allowed = max(min(slowest.values()), total / world * (1 + 1 / _WORTH_A_TRIAL))
    return max(size for size in sizes if slowest[size] <= allowed)


def largest_divisor(number: int, limit: int) -> int:
    """Returns the largest divisor of a number up to `limit`; at least 1."""
    candidates = range(1, max(1, min(number, limit)) + 1)
    return max(divisor for divisor in candidates if number % divisor == 0)


def _set_batch(
    config: ExperimentConfig, batch: int, changes: Mapping[str, Any]
) -> ExperimentConfig:
    train = config.train.model_copy(update={"batch_size_per_card": batch, **changes})
    return config.model_copy(update={"train": train})


def max_objects(objects_N: Sequence[int], augment: AugmentConfig) -> int:
    """Estimates the largest number of boxes that one augmented image can have.

    Mosaic, mix-up and copy-paste combine images, so their boxes add up: the result is the largest
    sum of many random draws.

    Args: objects_N: the number of boxes of each training image.
    """
    composed = MOSAIC_IMAGES if augment.mosaic else 1
    partners = (augment.mixup > 0) + (augment.cutmix > 0)
    images = composed * (1 + partners) + (augment.copy_paste > 0)
    counts_N = np.array(objects_N, np.int64)
    # A fixed seed, so that all ranks measure the same batch.
    drawn = np.random.default_rng(0).choice(counts_N, (_DRAWS, images)).sum(1).max()
    return int(max(1, drawn, counts_N.max()))


def _read_limits() -> dict[str, int]:
    """Reads how many bytes training may take on this rank, by kind of memory.

    Raises: ConfigError: the card does not report its free memory.
    """
    free = free_memory(comm.local_size())
    if device.on_accelerator() and CARD not in free:
        raise ConfigError(
            "auto: the card does not report its free memory",
            code="free_memory_unknown",
            where="train.batch_size_per_card",
            fix="give a number, or install Paddle 3.3",
        )
    return {kind: int(limit * _MEMORY_SHARE) for kind, limit in free.items()}


def job_of(config: ExperimentConfig, objects: int, images: int) -> dict[str, Any]:
    """Returns the fields of a run's `memory_probe.Job` that are the same in every trial.

    Args:
        objects: largest number of boxes per image, to which all images are padded.
        images: samples of an epoch over all ranks.
    """
    train = config.train
    # Two micro-batches need as much memory as any larger number: the second one already accumulates
    # gradients.
    micro_batches = 2 if (train.total_batch is not None or train.accumulate_steps > 1) else 1
    trial_config = _set_batch(config, 1, {"total_batch": None, "accumulate_steps": micro_batches})
    # The probe is a single process, so there are no ranks to share its steps with.
    distributed = config.distributed.model_copy(update={"shares": None})
    changes = {"device": device.kind(), "distributed": distributed}
    return {
        "config": trial_config.model_copy(update=changes).model_dump(mode="json"),
        "micro_batches": micro_batches,
        "objects": objects,
        "images": images,
        "several_ranks": comm.world_size() > 1,
    }


# Search


@dataclass(frozen=True)
class SearchResult:
    """The largest micro-batch of one rank, and the memory that limits it, for the log."""

    images: int
    reason: str


def search(
    trial: Callable[[Sequence[int]], Outcome], limits: Bytes, max_batch: int
) -> SearchResult:
    """Searches for the largest batch up to `max_batch` that trains within the limits, by trials.

    The first process doubles the batch as long as the next one is predicted to fit.  Each further
    trial runs in its own process, which starts directly with its batch, as the run will, and tries
    the largest batch predicted to fit; once a trial fails, the trials bisect the gap.  A batch is
    not tried if the last two measurements predict that it exceeds a limit: on a shared host, that
    could kill other processes.

    Args:
        trial: trains with batches, in ascending order, in one process; stops before a batch that is
            predicted not to fit.
        limits: bytes that may be used, by kind of memory.
    Raises: ConfigError: not even one image fits, or training fails altogether; errors of `trial`.
    """
    doubled = doublings(max_batch)
    measured, reason = trial(doubled)
    fitting = [batch for batch, used in measured.items() if fits(used, limits)]
    if not fitting:
        usage = f"it takes {tightest(measured[1], limits)}; {_SMALLER}" if measured else reason
        raise ConfigError(
            f"auto: not even one image fits: {usage}",
            code="no_image_fits",
            where="train.batch_size_per_card",
        )
    low, high = max(fitting), max_batch + 1
    if reason or len(fitting) < len(measured):
        high = min((batch for batch in doubled if batch > low), default=high)
    while True:
        top = min(largest_batch(measured, limits, max_batch), high - 1)
        if top - low < max(1, low // _WORTH_A_TRIAL):
            break
        # The first process may have used more than necessary, because smaller batches fragmented
        # its heap; so larger batches are predicted anew after each trial.
        # At most double: a line through two small batches does not extrapolate safely any further.
        batch = min(2 * low, top) if high > max_batch else (low + top + 1) // 2
        measured |= trial([batch])[0]
        if batch in measured and fits(measured[batch], limits):
            low = batch
        else:
            high = batch
    limit = "" if low < max_batch else f", and more than {max_batch} are of no use"
    return SearchResult(low, f"{low} take {tightest(measured[low], limits)}{limit}")


def doublings(last: int) -> list[int]:
    """Returns 1, 2, 4, ... and finally `last`."""
    return [*(1 << power for power in range((last - 1).bit_length())), last]


def fits(used: Bytes, limits: Bytes) -> bool:
    """Returns True if no kind of memory is above its limit."""
    return all(used.get(kind, 0) <= limit for kind, limit in limits.items())


def largest_batch(measured: Mapping[int, Bytes], limits: Bytes, max_batch: int) -> int:
    """Predicts the largest batch up to `max_batch` that fits, from the measured batches.

    Memory of each kind is modelled as a constant plus an amount per image: a line through the two
    largest batches or, if there is only one measurement, through the origin, which predicts a
    smaller batch.

    Args:
        measured: batch -> memory it used; at least one entry.
    Returns: the batch; 0 if not even one image fits.
    """
    (*_, previous, last) = [0, *sorted(measured)]
    result = max_batch
    for kind, limit in limits.items():
        used_bytes = measured[last].get(kind, 0)
        previous_bytes = measured[previous].get(kind, 0) if previous else 0
        bytes_per_image = (used_bytes - previous_bytes) / (last - previous)
        if bytes_per_image > 0:
            result = min(result, last + int((limit - used_bytes) // bytes_per_image))
        elif used_bytes > limit:
            result = 0
    return max(0, result)


def tightest(used: Bytes, limits: Bytes) -> str:
    """Describes the use of the kind of memory that is nearest its limit.

    For example `1.5 GiB of 2 GiB memory of the host`.
    """
    kind = max(limits, key=lambda name: used.get(name, 0) / max(1, limits[name]))
    return f"{format_bytes(used.get(kind, 0))} of {format_bytes(limits[kind])} {kind}"


def trial_of(
    job: Mapping[str, Any], limits: Bytes, deadline: float
) -> Callable[[Sequence[int]], Outcome]:
    """Returns the `trial` function of `search`, which trains with batches in a separate process.

    Args:
        job: from `job_of`.
        deadline: in time.monotonic() seconds; a process still running then is killed.
    Raises (when the returned function is called): UserError: the run itself could not be built
        either.
    """

    def trial(batches: Sequence[int]) -> Outcome:
        request = {**job, "batches": list(batches), "limits": dict(limits)}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "job.json").write_text(json.dumps(request), encoding="utf-8")
            reason = _run_probe(folder, deadline)
            file = folder / "took.jsonl"
            lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        measurements = [json.loads(line) for line in lines]
        return {row["batch"]: row["used"] for row in measurements}, reason

    return trial


def _run_probe(folder: Path, deadline: float) -> str:
    """Runs `memory_probe`; returns the reason why it ended early, with a remedy, or "".

    Raises: UserError: the configuration is invalid, so the run would fail as well.
    """
    if time.monotonic() > deadline:
        return _LATE
    command = python_module("ppdist.engine.memory_probe", str(folder))
    environment = own_environment()
    output, timeout = folder / "output", deadline - time.monotonic()
    heartbeat.name_place("looking for its batch")
    try:
        code = run_command(command, output, timeout, environment=environment, stop=heartbeat.alive)
    finally:
        heartbeat.name_place("")
    return _LATE if code is None else _explain_exit(code, folder, output)


def _explain_exit(code: int, folder: Path, output: Path) -> str:
    """Explains the exit code of a probe; returns and raises the same as `_run_probe`."""
    if code == 0:
        return ""
    if code == MISTAKE and (folder / "mistake").exists():
        raise Failure(**json.loads((folder / "mistake").read_text(encoding="utf-8"))).error()
    tail = output.read_text(encoding="utf-8", errors="replace").strip()[-_TAIL:]
    ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    message = f"it ended with {ending}{': ' * bool(tail)}{tail}"
    if code < 0 or code == NO_MEMORY:  # a limit may also kill a process by a signal
        return f"{message}; {_SMALLER}"
    return f"{message}; if memory is not the cause, give a number: training then says more"


# Free memory and used memory


def free_memory(ranks_on_host: int) -> dict[str, int]:
    """Returns the bytes that this rank may still take, by kind of memory.

    The host's memory is divided among its ranks.  If the card does not report its free memory, the
    result has no entry for it.
    """
    free_bytes = {HOST: available_memory() // max(1, ranks_on_host)}
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        free_bytes[ADDRESSES] = max(0, limit - process_memory()["VmSize"])
    if device.on_accelerator():
        free = _free_on_card()
        free_bytes |= {} if free is None else {CARD: free}
    return free_bytes


def _free_on_card() -> int | None:
    """Returns the free bytes on the card, or None if unknown.  Never tested on a GPU."""
    try:
        return int(paddle.cuda.mem_get_info()[0])
    except Exception:  # Paddle 3.2 has no such function; a driver may refuse in its own way
        return None


class Meter:
    """A meter of this process's peak memory since the meter was created."""

    def __init__(self) -> None:
        memory = process_memory()
        self._before = {HOST: memory["VmRSS"], ADDRESSES: memory["VmSize"]}

    def peak(self) -> dict[str, int]:
        """Returns the peak, in bytes by kind of memory."""
        now = process_memory()
        peak_bytes = {
            HOST: max(0, now["VmHWM"] - self._before[HOST]),
            ADDRESSES: max(0, now["VmPeak"] - self._before[ADDRESSES]),
        }
        if device.on_accelerator():
            peak_bytes[CARD] = device.peak_reserved_bytes()
        return peak_bytes


def format_bytes(amount: float) -> str:
    """Formats bytes as `1.25 GiB` or `640 MiB`."""
    return f"{amount / 2**30:.3g} GiB" if amount >= 2**30 else f"{amount / 2**20:.0f} MiB"

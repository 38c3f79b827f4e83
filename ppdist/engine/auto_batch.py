"""Auto batch: the largest micro-batch that memory allows, by trial.

`train.batch_size_per_card: auto` (`resolve_batch_size`): each rank trains with a few batches in a
process of its own (`memory_probe`), so whatever ends it ends no run: the kernel's out-of-memory
killer, a limit, oneDNN without memory for its buffers.  All ranks then take the least.  A run that
goes on keeps its micro-batches and looks for nothing.  Behind it stands the step, which goes on in
smaller micro-batches where memory runs out later (policies/memory.py).

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
Bytes = Mapping[str, int]  # by kind
# What each batch took, by kind; and why one of those asked for is missing, with a remedy, or "".
Outcome = tuple[dict[int, dict[str, int]], str]
MISTAKE, NO_MEMORY = 2, 3  # exit codes of `memory_probe`
_DRAWS = 10_000  # of images that are combined to one
_MEMORY_SHARE = 0.8  # of what is free; loaders and evaluation take of the rest
_SEARCH_SHARE = 0.5  # of distributed.timeout_seconds
_WORTH_A_TRIAL = 8  # not for less than an eighth more
_TAIL = 600  # characters of the end of its output
_SMALLER = "lower model.image_size (or train.multi_scale), take a smaller model, or give a number"
_LATE = (
    "training with it took longer than half of distributed.timeout_seconds; give a number, or "
    "raise that"
)


def resolve_batch_size(
    config: ExperimentConfig, records: Sequence[ImageRecord], images: int, start: Start
) -> tuple[ExperimentConfig, MicroBatches, list[str]]:
    """Replaces `train.batch_size_per_card: auto`, or more than the set has.  Collective.

    Called before anything large is built.
    Args:
        records: the training images.
        images: of an epoch over all ranks.
        start: where the run starts; one that goes on keeps its micro-batches.
    Returns: the configuration, the same on every rank; what its steps are made of; lines for the
        log.
    Raises: UserError, on every rank: not even one image fits somewhere, the run could not be built,
        the total batch is not to be had, or a run that resumes would have other micro-batches.
    """
    train, world = config.train, comm.world_size()
    whole_set = max_micro_batch(images, world * train.accumulate_steps)
    given = train.batch_size_per_card
    if start.made_of:
        then = start.made_of["batch_size_per_card"]
        follows = given == "auto" or (given >= whole_set and train.total_batch is None)
        config = _with_batch(config, then, {}) if follows else config
        batches = resumed_micro_batches(start, config.train, follows)
        where = "in the checkpoint" if start.snapshot else "where this job began"
        said = [f"{given} is {then}, as {where}"] if follows and given != then else []
    elif given == "auto":
        config, batches, said = _searched(config, records, images, whole_set)
    else:
        said = []
        if given > whole_set and train.total_batch is None:
            said = [f"{whole_set}, not {given}: the set has {images} images"]
            config = _with_batch(config, whole_set, {})
        batches = config.train.micro_batches(world)
    return config, batches, [f"train.batch_size_per_card: {each}" for each in said]


def _searched(
    config: ExperimentConfig, records: Sequence[ImageRecord], images: int, whole_set: int
) -> tuple[ExperimentConfig, MicroBatches, list[str]]:
    """As `resolve_batch_size`, for a new run with auto.  Collective."""
    train, world = config.train, comm.world_size()
    total = train.total_batch
    most = min(train.auto_batch_most, whole_set if total is None else math.ceil(total / world))
    objects = max_objects([len(record.labels_M) for record in records], config.data.augment)
    # A barrier, too: all ranks look before the first process takes some of it.
    limits = comm.run_on_all_ranks(_limits)
    deadline = time.monotonic() + _SEARCH_SHARE * config.distributed.timeout_seconds
    trial = trial_of(job_of(config, objects, images), limits, deadline)
    own = comm.run_on_all_ranks(lambda: search(trial, limits, most))
    told_W = comm.all_gather_object([own.images, own.why, comm.host()])
    least = min(found for found, *_ in told_W)
    ranks = [rank for rank, (found, *_) in enumerate(told_W) if found == least]
    batch = least if total is None else shared_batch(total, world, least, train.sync_bn)
    named = comm.ranks_named(ranks, [host for *_, host in told_W])
    said = f"auto is {batch}: of {named} {told_W[ranks[0]][1]}"
    if batch != least:
        said += f"; {batch} suits the {total} images of train.total_batch on {world} ranks"
    config = _with_batch(config, batch, {})
    return config, config.train.micro_batches(world), [said]


def shared_batch(total: int, world: int, most: int, spread: bool) -> int:
    """Largest micro-batch up to `most` that divides a step among ranks.

    Evenly if that is possible; else the rank with most micro-batches takes an eighth more images
    than its share at most, or as few as can be.

    Args: spread: each micro-batch is one of all ranks; then this is what a rank takes of it.
    """
    if spread:
        counts = [count for count in range(1, total + 1) if total % count == 0]
        return next(each for count in counts if (each := math.ceil(total / count / world)) <= most)
    if total % world == 0:
        return largest_divisor(total // world, most)
    divisors = [each for each in range(1, max(1, min(total, most)) + 1) if total % each == 0]
    slowest = {each: math.ceil(total // each / world) * each for each in divisors}
    allowed = max(min(slowest.values()), total / world * (1 + 1 / _WORTH_A_TRIAL))
    return max(each for each in divisors if slowest[each] <= allowed)


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number up to `most`; at least 1."""
    return max(each for each in range(1, max(1, min(number, most)) + 1) if number % each == 0)


def _with_batch(
    config: ExperimentConfig, batch: int, changes: Mapping[str, Any]
) -> ExperimentConfig:
    train = config.train.model_copy(update={"batch_size_per_card": batch, **changes})
    return config.model_copy(update={"train": train})


def max_objects(objects_N: Sequence[int], augment: AugmentConfig) -> int:
    """Largest number of boxes that an image of a batch can have.

    Estimated from many random draws.
    """
    composed = MOSAIC_IMAGES if augment.mosaic else 1
    partners = (augment.mixup > 0) + (augment.cutmix > 0)
    images = composed * (1 + partners) + (augment.copy_paste > 0)
    counts_N = np.array(objects_N, np.int64)
    drawn = np.random.default_rng(0).choice(counts_N, (_DRAWS, images)).sum(1).max()
    return int(max(1, drawn, counts_N.max()))


def _limits() -> dict[str, int]:
    """What training may take on this rank, by kind.

    Raises: ConfigError: the card does not say how much it has free.
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
    """The `memory_probe.Job` of a run, without what changes from trial to trial.

    Args:
        objects: padded boxes of an image, at most.
        images: of an epoch over all ranks.
    """
    train = config.train
    several = 2 if (train.total_batch is not None or train.accumulate_steps > 1) else 1
    trial_config = _with_batch(config, 1, {"total_batch": None, "accumulate_steps": several})
    alone = config.distributed.model_copy(update={"shares": None})
    changes = {"device": device.kind(), "distributed": alone}
    return {
        "config": trial_config.model_copy(update=changes).model_dump(mode="json"),
        "micro_batches": several,
        "objects": objects,
        "images": images,
        "several_ranks": comm.world_size() > 1,
    }


# Search


@dataclass(frozen=True)
class SearchResult:
    """The largest micro-batch of one rank."""

    images: int
    why: str


def search(trial: Callable[[Sequence[int]], Outcome], limits: Bytes, most: int) -> SearchResult:
    """The largest batch up to `most` that trains within its limits, by trial.

    One process doubles the batch as long as that should fit.  Further ones, each of which begins
    with its batch, as the run will, go on to the largest that should fit; once one fails, they
    halve the gap.  No trial is made that the last two say would pass a limit: on a host it might
    end others.

    Args:
        trial: trains with batches, in ascending order, in one process; it stops before one that
            should not fit.
        limits: what may be taken, by kind.
    Raises: ConfigError: not even one image fits, or training fails altogether; and what `trial`
        raises.
    """
    doubled = doublings(most)
    measured, reason = trial(doubled)
    fitting = [batch for batch, used in measured.items() if fits(used, limits)]
    if not fitting:
        took = f"it takes {tightest(measured[1], limits)}; {_SMALLER}" if measured else reason
        raise ConfigError(
            f"auto: not even one image fits: {took}",
            code="no_image_fits",
            where="train.batch_size_per_card",
        )
    low, bad = max(fitting), most + 1
    if reason or len(fitting) < len(measured):
        bad = min((batch for batch in doubled if batch > low), default=bad)
    while True:
        top = min(largest_batch(measured, limits, most), bad - 1)
        if top - low < max(1, low // _WORTH_A_TRIAL):
            break
        # What the first process took is too much where the sizes before left gaps in its heap, so
        # what it says of larger batches is said anew after each trial.
        batch = min(2 * low, top) if bad > most else (low + top + 1) // 2
        measured |= trial([batch])[0]
        if batch in measured and fits(measured[batch], limits):
            low = batch
        else:
            bad = batch
    limit = "" if low < most else f", and more than {most} are of no use"
    return SearchResult(low, f"{low} take {tightest(measured[low], limits)}{limit}")


def doublings(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`, which is the last."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def fits(used: Bytes, limits: Bytes) -> bool:
    """Whether no kind is above its limit."""
    return all(used.get(kind, 0) <= limit for kind, limit in limits.items())


def largest_batch(measured: Mapping[int, Bytes], limits: Bytes, most: int) -> int:
    """Largest batch up to `most` that should fit, given the measured ones.

    For each kind of memory the model is a constant plus an amount per image: a line through the two
    largest batches, or, with one measurement, a line through zero, which gives less.

    Args:
        measured: batch -> memory it took; at least one entry.
    Returns: 0: not even one image fits.
    """
    (*_, before, last) = [0, *sorted(measured)]
    result = most
    for kind, limit in limits.items():
        used = measured[last].get(kind, 0)
        lower = measured[before].get(kind, 0) if before else 0
        each = (used - lower) / (last - before)
        if each > 0:
            result = min(result, last + int((limit - used) // each))
        elif used > limit:
            result = 0
    return max(0, result)


def tightest(used: Bytes, limits: Bytes) -> str:
    """Usage of the kind of memory that is nearest its limit.

    For example `1.5 GiB of 2 GiB memory of the host`.
    """
    kind = max(limits, key=lambda each: used.get(each, 0) / max(1, limits[each]))
    return f"{shown(used.get(kind, 0))} of {shown(limits[kind])} {kind}"


def trial_of(
    job: Mapping[str, Any], limits: Bytes, deadline: float
) -> Callable[[Sequence[int]], Outcome]:
    """Function for `search` that trains with batches in a separate process.

    Args:
        job: from `job_of`.
        deadline: by time.monotonic(); a process that has not finished by then is killed.
    Raises (when called): UserError: the run itself could not be built either.
    """

    def trial(batches: Sequence[int]) -> Outcome:
        asked = {**job, "batches": list(batches), "limits": dict(limits)}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "job.json").write_text(json.dumps(asked), encoding="utf-8")
            why = _run_probe(folder, deadline)
            took = folder / "took.jsonl"
            lines = took.read_text(encoding="utf-8").splitlines() if took.exists() else []
        told = [json.loads(line) for line in lines]
        return {each["batch"]: each["used"] for each in told}, why

    return trial


def _run_probe(folder: Path, deadline: float) -> str:
    """Runs `memory_probe`; returns why it ended early, with a remedy, or "".

    Raises: UserError: a mistake of the user's.
    """
    if time.monotonic() > deadline:
        return _LATE
    command = python_module("ppdist.engine.memory_probe", str(folder))
    environment = own_environment()
    output, left = folder / "output", deadline - time.monotonic()
    heartbeat.name_place("looking for its batch")
    try:
        code = run_command(command, output, left, environment=environment, stop=heartbeat.alive)
    finally:
        heartbeat.name_place("")
    return _LATE if code is None else _why_it_ended(code, folder, output)


def _why_it_ended(code: int, folder: Path, output: Path) -> str:
    """Why an ended process stopped early, as of `_run_probe`."""
    if code == 0:
        return ""
    if code == MISTAKE and (folder / "mistake").exists():
        raise Failure(**json.loads((folder / "mistake").read_text(encoding="utf-8"))).error()
    tail = output.read_text(encoding="utf-8", errors="replace").strip()[-_TAIL:]
    ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    words = f"it ended with {ended}{': ' * bool(tail)}{tail}"
    if code < 0 or code == NO_MEMORY:  # limits end a process by signals, too
        return f"{words}; {_SMALLER}"
    return f"{words}; if memory is not the cause, give a number: training then says more"


# Memory there is, and memory taken


def free_memory(ranks_on_host: int) -> dict[str, int]:
    """Bytes that this rank may still take, by kind of memory.

    Of the host's memory, this rank's share.  A card that does not report its free memory is left
    out.
    """
    found = {HOST: available_memory() // max(1, ranks_on_host)}
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        found[ADDRESSES] = max(0, limit - process_memory()["VmSize"])
    if device.on_accelerator():
        free = _free_on_card()
        found |= {} if free is None else {CARD: free}
    return found


def _free_on_card() -> int | None:
    """Free bytes on the card; None: unknown.  Not run on a GPU."""
    try:
        return int(paddle.cuda.mem_get_info()[0])
    except Exception:  # Paddle 3.2 has no such function; a driver may refuse in its own way
        return None


class Meter:
    """Peak memory of this process since the meter was made."""

    def __init__(self) -> None:
        before = process_memory()
        self._before = {HOST: before["VmRSS"], ADDRESSES: before["VmSize"]}

    def peak(self) -> dict[str, int]:
        """Peak bytes by kind."""
        now = process_memory()
        found = {
            HOST: max(0, now["VmHWM"] - self._before[HOST]),
            ADDRESSES: max(0, now["VmPeak"] - self._before[ADDRESSES]),
        }
        if device.on_accelerator():
            found[CARD] = device.peak_reserved_bytes()
        return found


def shown(amount: float) -> str:
    """Formats bytes as `1.25 GiB` or `640 MiB`."""
    return f"{amount / 2**30:.3g} GiB" if amount >= 2**30 else f"{amount / 2**20:.0f} MiB"

"""Data loader: batches prepared in worker processes, or in this one.

    sampler -> keys -> Samples (in a worker) -> images in a slot of shared memory -> Batch
                                             -> boxes and the like through a socket ->

The sampler provides the keys, so workers need no signal when an epoch begins, and a batch does not
depend on the number of workers or on restarts.  Results keep the order of the plan, whichever
worker finishes first.  Images cross processes as uint8.

If the storage of images is unavailable, a worker waits for it and its rank reports that once.  If
it stays unavailable, the iteration ends with a blank batch, so that the rank still reaches its
collectives.

A worker that dies, or is busy with one image for too long, is killed and replaced, and its
unfinished batches are rebuilt.  A batch is a function of its keys, so none is lost, repeated or
changed.  If two workers in a row died while reading a record, it goes to the blocklist.

Slots are in anonymous, inherited memory: /dev/shm, which is small in containers, is not used.  A
worker ends with its rank, however the rank ends.
"""

import errno
import gc
import itertools
import logging
import math
import mmap
import os
import pickle
import signal
import socket
import struct
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import wait
from typing import Any, Literal, NamedTuple, Protocol

import cv2
import numpy as np
import paddle

from ppdist.common.child import ForkedChild
from ppdist.common.errors import DataError
from ppdist.common.machine import available_cores
from ppdist.common.process import DETAIL
from ppdist.config.data import DataConfig
from ppdist.data.cache import open_cache
from ppdist.data.loading.sampler import EvalSampler, TrainSampler, rectangular_shapes
from ppdist.data.transforms.classification import ClassifyEvalSamples, ClassifyTrainSamples
from ppdist.data.transforms.pipeline import (
    EvalSamples,
    Samples,
    TrainSamples,
    pad_boxes,
    reductions,
)
from ppdist.data.types import (
    EXITED,
    HUNG,
    NOTHING,
    Arrays,
    Batch,
    DetectionSet,
    ImagesUnavailable,
    Records,
    SampleKey,
    WorkerBatch,
)
from ppdist.distributed import comm, device, heartbeat

_LOGGER = logging.getLogger("ppdist.data")

_MAX_WORKERS = 16  # more than 2,000 images a second: no card trains that fast today
_CORES_PER_WORKER_ON_CPU = 4  # a worker prepares more images than four cores can train on

# The keys of a batch, the result of its worker, and its arrays, named as in Batch.
_Delivered = tuple[list[SampleKey], WorkerBatch, dict[str, Any]]


class _KeyPlan(Protocol):
    """A re-iterable sampler of the keys of micro-batches."""

    def __iter__(self) -> Iterator[list[SampleKey]]: ...
    def __len__(self) -> int: ...


class _Loader:
    """A re-iterable loader of the batches of a plan.

    Workers start with the first iteration and live until the loader is closed or collected.  A new
    iteration ends the previous one.

    Attributes:
        plan: plan of the next iteration; may be replaced.
        workers: number of processes that prepare batches.
    """

    def __init__(
        self,
        samples: Samples,
        plan: _KeyPlan,
        *,
        workers: int,
        largest_batch: int,
        timeout_seconds: float,
    ) -> None:
        """Args: see WorkerPool."""
        self.plan = plan
        self.workers = workers
        self._samples = samples
        self._largest_batch = largest_batch
        self._timeout = timeout_seconds
        self._pool: WorkerPool | None = None
        self._warned: set[str] = set()

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Generator[Batch, None, None]:
        """Yields the batches of the plan.

        Raises, while iterating:
            DataError: an image cannot be read and data.bad_images is `error`, or too many images in
                a row cannot be read.
            ImagesUnavailable: their storage stays unavailable.
            RuntimeError: preparing a batch failed for another reason.
        """
        try:
            for keys, worker_batch, arrays in self._deliver():
                self._report(worker_batch)
                batch = Batch(
                    **arrays,
                    # Padding, or the blank image of an outage, only keeps the collectives going.
                    real=keys[0].index >= 0 and worker_batch.outage is None,
                    bad_images=worker_batch.bad_images,
                )
                if worker_batch.outage is not None:
                    raise ImagesUnavailable(worker_batch.outage, batch)
                yield batch
        except Exception:
            self.close()  # an exception keeps this frame, and so the workers, alive
            raise

    def close(self) -> None:
        """Ends the workers; a further iteration starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def abort_waits(self) -> None:
        """Stops waiting for unavailable storage; may be called during an iteration."""
        self._samples.waits_aborted[0] = 1

    @property
    def worker_ids(self) -> list[int]:
        """Process ids of the living workers."""
        return self._pool.process_ids if self._pool else []

    def _deliver(self) -> Iterator[_Delivered]:
        if self.workers:
            if self._pool is None:
                self._pool = WorkerPool(
                    self._samples, self.workers, self._largest_batch, self._timeout
                )
            yield from self._pool.run(self.plan)
        else:
            cv2.setNumThreads(0)  # as in workers: the cores belong to training
            outages = _Outages(self._samples)

            def pause(seconds: float) -> None:
                outages.update([self._samples.awaited])
                _sleep(seconds, heartbeat.alive, self._samples.waits_aborted)

            self._samples.pause = pause
            for keys in self.plan:
                worker_batch = self._samples.batch(keys)
                outages.update([self._samples.awaited])
                yield keys, worker_batch, _move_arrays(worker_batch)

    def _report(self, worker_batch: WorkerBatch) -> None:
        if worker_batch.user_error:
            raise worker_batch.user_error
        if worker_batch.our_error:
            raise RuntimeError(worker_batch.our_error)
        for problem in worker_batch.problems:
            # Logged once, as a bad image comes up again in every epoch.
            if problem not in self._warned:
                self._warned.add(problem)
                _LOGGER.warning(problem)


class _Outages:
    """A log of outages of the storage of images: when they begin and end."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._since: float | None = None

    def update(self, awaited: Iterable[np.ndarray]) -> None:
        """Logs the start or end of an outage.

        Args: awaited: an array for each process that reads images; see `Samples`.
        """
        outage = next((pair.tolist() for pair in awaited if pair[0] != NOTHING), None)
        if outage is not None and self._since is None:
            self._since = time.monotonic()
            also = ", nor can others of its folder be read" * (outage[1] != errno.EREMOTEIO)
            _LOGGER.warning(
                "%s: %s%s: their storage is unavailable; waiting for it for up to %.0f s",
                self._samples.path(outage[0]), os.strerror(outage[1]), also,
                self._samples.storage_seconds,
            )  # fmt: skip
        elif outage is None and self._since is not None:
            seconds = time.monotonic() - self._since
            _LOGGER.info("the images can be read again, after %.0f s", seconds)
            self._since = None


def _sleep(seconds: float, alive: Callable[[], None], aborted: np.ndarray) -> None:
    """Sleeps for `seconds` or until `aborted` is set, and keeps calling `alive`."""
    deadline = time.monotonic() + seconds
    alive()
    while (left := deadline - time.monotonic()) > 0 and not aborted[0]:
        time.sleep(min(left, _SIGN_SECONDS))
        alive()


def on_device(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Moves the arrays of a `Batch`, without its seeds, to the device of the model.

    Args: arrays: see `Arrays`; their memory may be reused.
    """
    return {
        name: array if name == "seeds_B" else device.put(array) for name, array in arrays.items()
    }


def _move_arrays(worker_batch: WorkerBatch) -> dict[str, Any]:
    return {} if worker_batch.arrays is None else on_device(worker_batch.arrays._asdict())


class TrainLoader(_Loader):
    """This rank's training micro-batches, from the sampler's first step to its last.

    Crowd boxes are left out: they do not show a single object.
    """

    def __init__(
        self,
        dataset: DetectionSet,
        config: DataConfig,
        sampler: TrainSampler,
        *,
        seed: int,
        epochs: int | None = None,
        ranks_on_host: int = 1,
    ) -> None:
        """Creates a loader; with data.cache: ram collective, and logs the capacity of the cache.

        Args:
            sampler: of this rank; its `dataset_size` is that of `dataset`.
            seed: of augmentation, together with (epoch, index).
            epochs: of the whole run; those of data.augment count back from its end.
            ranks_on_host: ranks that share this machine, including this one.
        """
        kind = ClassifyTrainSamples if config.task == "classify" else TrainSamples
        # The maximum of each side, as reduced pixels have to suffice for every input size.
        largest = (
            max(height for height, _ in sampler.every_size),
            max(width for _, width in sampler.every_size),
        )
        reductions_N = reductions(dataset, config.augment, largest, config.resize)
        samples = kind(
            dataset,
            config.bad_images,
            config.augment,
            seed,
            resize=config.resize,
            epochs=epochs,
            reductions_N=reductions_N,
            cache=open_cache(config.cache, dataset, reductions_N),
            storage_seconds=comm.step_storage_seconds(),
        )
        pixels = max(height * width for height, width in sampler.every_size)
        batches = sampler.batches
        uneven = batches.speeds is not None  # or may become so
        largest_pass = batches.images if uneven else batches.per_rank(sampler.world)
        super().__init__(
            samples,
            sampler,
            workers=worker_count(config.workers, ranks_on_host),
            largest_batch=largest_pass * 3 * pixels,
            timeout_seconds=config.worker_timeout_seconds,
        )


class EvalLoader(_Loader):
    """This rank's share of a split, each image once; re-iterable.

    Images are whole, stretched or letterboxed (data.resize), with all boxes, crowds too; a
    classifier gets their centre.
    """

    def __init__(
        self,
        dataset: DetectionSet,
        config: DataConfig,
        *,
        image_size: tuple[int, int],
        batch_size: int,
        rank: int,
        world: int,
        ranks_on_host: int = 1,
        shape_multiple: int | None = None,
        shape_pad: float = 0.0,
    ) -> None:
        """
        Args:
            image_size: (height, width) of the input in pixels.
            batch_size: images per batch; the last may be smaller.
            ranks_on_host: ranks that share this machine, including this one.
            shape_multiple: letterbox each image in the smallest input within `image_size` whose
                sides are multiples of this many pixels; None: always `image_size`.
            shape_pad: see `rectangular_shapes`: inputs may be larger than `image_size`, but not
                the images in them.
        """
        shapes_N2, largest = None, image_size[0] * image_size[1]
        if shape_multiple is not None:
            sizes_N2 = Records.of(dataset.records).sizes_N2
            shapes_N2 = rectangular_shapes(sizes_N2, image_size, shape_multiple, shape_pad)
            largest = int(shapes_N2.prod(axis=1).max(initial=largest))
        kind = ClassifyEvalSamples if config.task == "classify" else EvalSamples
        samples = kind(
            dataset,
            config.bad_images,
            resize=config.resize,
            within=image_size if shape_pad else None,
            storage_seconds=comm.storage_seconds(),
        )
        self._learnable = samples.learnable
        super().__init__(
            samples,
            EvalSampler(len(dataset.records), batch_size, rank, world, image_size, shapes_N2),
            workers=worker_count(config.workers, ranks_on_host),
            largest_batch=batch_size * 3 * largest,
            timeout_seconds=config.worker_timeout_seconds,
        )

    def learnable(
        self, keys: Sequence[SampleKey]
    ) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
        """Returns boxes_BM4, labels_BM and mask_BM that training would use; see `Batch`.

        Reads no image.
        """
        boxes_BM4, labels_BM, mask_BM = pad_boxes([self._learnable(key) for key in keys])
        return paddle.to_tensor(boxes_BM4), paddle.to_tensor(labels_BM), paddle.to_tensor(mask_BM)


@cache  # one line, not one for each loader
def worker_count(wanted: int | Literal["auto"], ranks_on_host: int) -> int:
    """Chooses the number of workers per rank; logs the number and the reason.

    auto: with a GPU, all cores but one per rank, at most 16.  Without one, training itself needs
    the cores, and a quarter of them, at most 4, prepare enough images.

    Args:
        wanted: `data.workers`; a number is used as it is.
        ranks_on_host: ranks that share this machine, including this one.
    """
    cores = available_cores()
    share = cores / max(1, ranks_on_host)
    cores_text = f"{cores:.3g} cores" + (f" for {ranks_on_host} ranks" if ranks_on_host > 1 else "")
    if wanted == "auto":
        count, reason = _automatic_workers(share, device.on_accelerator())
        message = "data.workers: auto is %d per rank: %s, %s"
        _LOGGER.info(message, count, cores_text, reason, extra=DETAIL)
        return count
    if wanted > max(1, share):
        _LOGGER.warning(
            "data.workers: %d per rank are more than %s can run at once; auto would choose %d",
            wanted, cores_text, _automatic_workers(share, device.on_accelerator())[0],
        )  # fmt: skip
    return wanted


def _automatic_workers(share: float, gpu: bool) -> tuple[int, str]:
    """Returns (workers, reason) for a rank with this share of the cores."""
    if gpu:
        count = min(_MAX_WORKERS, max(1, int(share) - 1))
        return count, "one for the rank itself"
    count = min(4, max(1, int(share / _CORES_PER_WORKER_ON_CPU)))
    return count, "most of them needed for training, which has no GPU"


# --- workers -------------------------------------------------------------------------------------

_SLOTS = 2  # per worker: one is filled while the rank empties the other
_SIGN_SECONDS = 0.2  # between two heartbeats while waiting for storage
# How often an idle worker checks its rank, and the rank checks for workers that hang or that wait
# for storage (for a second at least).
_LOOK_SECONDS = 0.5
_LENGTH = struct.Struct("<I")  # before each message
# Worker deaths per batch: at one record until it is blocked; in a row until the run fails.
_CULPRIT_FAILURES, _MAX_FAILURES = 2, 3


@dataclass
class Task:
    """A batch to be prepared."""

    number: int
    keys: list[SampleKey]
    stopped_at: list[int] = field(default_factory=list)


class Result(NamedTuple):
    """A batch that a worker has prepared.

    worker_batch: the batch without its arrays.  shape: shape of the images in the slot, () on
    error.
    """

    number: int
    shape: tuple[int, ...]
    small_arrays: tuple[np.ndarray, ...]
    worker_batch: WorkerBatch


class _MessageSplitter:
    """A splitter of a byte stream, which arrives in pieces, into messages."""

    def __init__(self) -> None:
        self._content = bytearray()

    def complete(self, content: bytes) -> list[Any]:
        """Returns the messages that this piece of the stream completes."""
        self._content += content
        messages = []
        while len(self._content) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._content)[0]
            if len(self._content) < end:
                break
            messages.append(pickle.loads(memoryview(self._content)[_LENGTH.size : end]))
            del self._content[:end]
        return messages


def _pack_message(message: Any) -> bytes:
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


@dataclass(eq=False)
class Worker:
    """A worker process, as its rank sees it.

    reading, awaited, beat: written by the process: the record it is reading; the record whose
    storage it is waiting for; time.monotonic() when it last began to read, began or finished a
    batch, or waited.
    process: None before the worker starts.
    free: free slots.  tasks: unfinished tasks with their slots, in the order of assignment.
    changed: when the worker last sent something, or got a task while it had none.
    """

    link: socket.socket
    slots: list[np.ndarray]
    reading: np.ndarray
    awaited: np.ndarray
    beat: np.ndarray
    process: ForkedChild | None = None
    free: list[int] = field(default_factory=lambda: list(range(_SLOTS)))
    tasks: dict[int, tuple[Task, int]] = field(default_factory=dict)
    changed: float = 0.0
    inbox: _MessageSplitter = field(default_factory=_MessageSplitter)

    def assign(self, task: Task) -> None:
        slot = self.free.pop()
        if not self.tasks:
            self.changed = time.monotonic()
        self.tasks[task.number] = task, slot
        with suppress(OSError):  # it has ended or hangs: noticed later, the task is listed
            self.link.sendall(_pack_message((task.number, slot, task.keys)))

    def receive(self) -> tuple[bool, list[Result]]:
        """Reads the data that the process has sent.

        Returns: True if the process is alive; the complete results.
        """
        try:
            content = self.link.recv(1 << 20)
        except OSError:
            content = b""
        self.changed = time.monotonic()
        return bool(content), self.inbox.complete(content)

    def busy_seconds(self) -> float:
        """Returns the seconds since the last sign of life during the current task."""
        if not self.tasks:
            return 0.0
        return time.monotonic() - max(self.changed, float(self.beat[0]))

    def end(self) -> int:
        """Kills the process; returns the signal that ended it, or EXITED."""
        self.link.close()
        code = self.process and self.process.end()
        return -code if code and code < 0 else EXITED


class WorkerPool:
    """A pool of workers that prepare batches from one `Samples`, for one plan after another."""

    def __init__(
        self, samples: Samples, workers: int, largest_batch: int, timeout_seconds: float
    ) -> None:
        """
        Args:
            workers: number of processes.
            largest_batch: bytes of the images of the largest batch of any plan.
            timeout_seconds: a worker busy with one image for longer counts as hung.
        Raises: DataError: the workers cannot be started.
        """
        self._samples = samples
        self._bytes = largest_batch
        self._timeout = timeout_seconds
        self._numbers = itertools.count()
        self._outages = _Outages(samples)
        self._wanted: dict[int, Task] = {}  # tasks of the current run, in order, not yet yielded
        self._done: dict[int, tuple[WorkerBatch, Worker, int]] = {}
        # Shared, so that all workers see at once which records are blocked.
        samples.blocklist_N = _allocate_shared(len(samples), np.uint8)
        samples.waited = _allocate_shared(2, np.float64)
        aborted, samples.waits_aborted = samples.waits_aborted, _allocate_shared(1, np.uint8)
        samples.waits_aborted |= aborted  # a stop may come between the two
        self._workers: list[Worker] = []
        self._end = weakref.finalize(self, _end_workers, self._workers, os.getpid())  # also at exit
        try:
            for _ in range(workers):
                self._workers.append(self._start_worker())
        except OSError as error:
            self.close()
            raise DataError(
                f"the processes that prepare images cannot be started ({error.strerror or error})",
                code="workers_not_started",
                where="data.workers",
                fix="lower data.workers or train.batch_size_per_card",
            ) from error

    def close(self) -> None:
        """Ends the workers for good; also done when the pool is garbage-collected."""
        self._wanted = {}
        self._end()

    @property
    def process_ids(self) -> list[int]:
        process_ids = (worker.process.pid for worker in self._workers if worker.process)
        return [pid for pid in process_ids if pid]

    def run(self, plan: Iterable[list[SampleKey]]) -> Iterator[_Delivered]:
        """Yields the batches of a plan in order; ends an unfinished run.

        Raises, while iterating: RuntimeError: a batch killed three workers, or this run has been
            ended.
        """
        # Results of an abandoned run are dropped, and their slots are free again.
        for _, worker, slot in self._done.values():
            worker.free.append(slot)
        self._done.clear()
        wanted: dict[int, Task] = {}
        self._wanted, remaining = wanted, iter(plan)
        more = self._hand_out_tasks(remaining)
        while wanted or more:
            number = next(iter(wanted), None)
            if number is None or number not in self._done:
                self._receive_results()
                more = more and self._hand_out_tasks(remaining)
                continue
            worker_batch, worker, slot = self._done.pop(number)
            arrays = _move_arrays(worker_batch)
            # The arrays are on the device now, so the worker may overwrite them.
            worker.free.append(slot)
            task = wanted.pop(number)
            more = more and self._hand_out_tasks(remaining)
            yield task.keys, worker_batch, arrays
            if self._wanted is not wanted:
                raise RuntimeError("this iteration is over: its loader was closed or iterated anew")

    def _hand_out_tasks(self, remaining: Iterator[list[SampleKey]]) -> bool:
        """Gives a batch to every free slot, least busy workers first.

        Returns: False at the end of the plan.
        """
        while free := [worker for worker in self._workers if worker.free]:
            keys = next(remaining, None)
            if keys is None:
                return False
            task = Task(next(self._numbers), keys)
            self._wanted[task.number] = task
            min(free, key=lambda worker: len(worker.tasks)).assign(task)
        return True

    def _receive_results(self) -> None:
        """Receives results, and replaces workers that have died or hung."""
        heartbeat.alive()  # only a worker can hang here, and that is replaced below
        by_link = {worker.link.fileno(): worker for worker in self._workers}
        for link in wait([*by_link], min(_LOOK_SECONDS, self._timeout)):
            assert isinstance(link, int)
            worker = by_link[link]
            alive, results = worker.receive()
            for result in results:
                self._accept_result(worker, result)
            if not alive:
                self._replace(worker, hung=False)
        self._outages.update(worker.awaited for worker in self._workers)
        for worker in list(self._workers):
            if worker.busy_seconds() > self._timeout:
                self._replace(worker, hung=True)

    def _accept_result(self, worker: Worker, result: Result) -> None:
        task, slot = worker.tasks.pop(result.number)
        if task.number not in self._wanted:  # a result of an abandoned run
            worker.free.append(slot)
            return
        worker_batch = result.worker_batch
        if result.shape:
            pixels = worker.slots[slot][: math.prod(result.shape)]
            images_B3HW = pixels.reshape(result.shape)
            worker_batch = worker_batch._replace(arrays=Arrays(images_B3HW, *result.small_arrays))
        self._done[task.number] = worker_batch, worker, slot

    def _replace(self, worker: Worker, hung: bool) -> None:
        code = worker.end()
        how = (
            f"was busy with one image for more than {self._timeout:g} s"
            if hung
            else f"ended with {_describe_exit(code)}"
        )
        index = int(worker.reading[0])
        where = "" if index == NOTHING else f" while reading {self._samples.path(index)}"
        place = self._workers.index(worker)
        lost = [task for task, _ in worker.tasks.values() if task.number in self._wanted]
        if lost:
            self._block_culprit(lost[0], index, HUNG if hung else code, how)
        _LOGGER.warning(
            f"worker {place + 1} of {len(self._workers)}, which prepares images, {how}{where}; "
            f"restarted; unfinished batches are rebuilt"
        )
        try:
            self._workers[place] = replacement = self._start_worker()
        except OSError as error:
            raise RuntimeError(
                f"a worker that prepares images {how}, and no other can be started "
                f"({error.strerror or error}); the usual reason is memory: lower data.workers"
            ) from error
        for task in lost:
            replacement.assign(task)

    def _block_culprit(self, task: Task, index: int, code: int, how: str) -> None:
        """Blocks the record at `index` if a worker stopped at it in this batch before.

        Raises: RuntimeError: workers died too often in this batch, and no single record is to
            blame.
        """
        task.stopped_at.append(index)
        # The first death may have another cause, such as a lack of memory.
        if index != NOTHING and task.stopped_at.count(index) >= _CULPRIT_FAILURES:
            self._samples.blocklist_N[index] = code
            task.stopped_at.clear()
        elif len(task.stopped_at) >= _MAX_FAILURES:
            first = next((key.index for key in task.keys if key.index >= 0), NOTHING)
            images = f"its first image is {self._samples.path(first)}; " if first >= 0 else ""
            raise RuntimeError(
                f"{_MAX_FAILURES} workers in a row failed to prepare the same batch of images, "
                f"the last {how}, not because of one image; {images}if the disk is slow, "
                f"raise data.worker_timeout_seconds"
            )

    def _start_worker(self) -> Worker:
        """Forks a worker.  Raises: OSError: too little memory, or too many processes."""
        rank_end, worker_end = socket.socketpair()
        slots = [_allocate_shared(self._bytes, np.uint8) for _ in range(_SLOTS)]
        reading, awaited = (_allocate_shared(count, np.int64) for count in (1, 2))
        worker = Worker(rank_end, slots, reading, awaited, _allocate_shared(1, np.float64))
        worker.reading[0] = worker.awaited[0] = NOTHING
        rank_end.settimeout(self._timeout)
        samples, rank_id = self._samples, os.getpid()
        with worker_end:
            try:
                worker.process = ForkedChild(lambda: work(samples, worker, worker_end, rank_id))
            except OSError:
                rank_end.close()
                raise
        return worker


def _allocate_shared(count: int, dtype: type[np.generic]) -> np.ndarray:
    """Creates an array of zeros that processes forked from now on share.  Raises: OSError."""
    memory = mmap.mmap(-1, max(1, count) * np.dtype(dtype).itemsize)
    return np.frombuffer(memory, dtype, count)


def _describe_exit(code: int) -> str:
    if code == signal.SIGKILL:
        return "SIGKILL (the usual reason is memory: lower data.workers)"
    return "an exit" if code == EXITED else signal.Signals(code).name


def _end_workers(workers: list[Worker], rank_id: int) -> None:
    if os.getpid() == rank_id:  # and not a copy of it
        for worker in workers:
            if worker.process:
                worker.process.kill()
        for worker in workers:
            worker.end()
        workers.clear()


def work(samples: Samples, worker: Worker, link: socket.socket, rank: int) -> None:
    """Runs a worker process: prepares batches while the rank is alive."""
    worker.link.close()
    os.setpgid(0, 0)  # a signal to the rank's group is for the rank: it still needs its workers
    for number in (signal.SIGTERM, signal.SIGINT):  # the rank's own request a stop after the step
        signal.signal(number, signal.SIG_DFL)
    # For a 640 x 480 image, page faults took longer than decoding (1.2 against 0.9 ms).
    comm.keep_freed_memory()
    gc.freeze()  # what is inherited stays shared, and none of it is finalized here
    cv2.setNumThreads(0)  # one thread per worker
    samples.reading, samples.awaited = worker.reading, worker.awaited
    samples.beat = worker.beat
    samples.pause = lambda seconds: _sleep(seconds, beat, samples.waits_aborted)
    # A timeout, so that an idle worker regularly checks that its rank is alive.
    link.settimeout(_LOOK_SECONDS)

    def beat() -> None:
        if os.getppid() != rank:
            os._exit(1)
        worker.beat[0] = time.monotonic()

    inbox = _MessageSplitter()
    while content := _receive(link, rank):
        for number, slot, keys in inbox.complete(content):
            beat()
            worker_batch = samples.batch(keys, worker.slots[slot])
            arrays, worker_batch = worker_batch.arrays, worker_batch._replace(arrays=None)
            shape = arrays.images_B3HW.shape if arrays else ()
            beat()
            _send(
                link,
                _pack_message(Result(number, shape, arrays[1:] if arrays else (), worker_batch)),
                rank,
            )


def _receive(link: socket.socket, rank: int) -> bytes:
    """Receives bytes from the rank; b"" once the rank has exited."""
    while os.getppid() == rank:
        with suppress(TimeoutError):
            return link.recv(1 << 16)
    return b""


def _send(link: socket.socket, content: bytes, rank: int) -> None:
    """Sends all of the content, even if the rank is busy for minutes."""
    left = memoryview(content)
    while left and os.getppid() == rank:
        with suppress(TimeoutError):
            left = left[link.send(left) :]

"""Processes that prepare batches, and go on preparing them when one of them dies or hangs.

    plan -> keys -> a worker -> images, in a slot of shared memory -> taken out -> in plan order
                             -> boxes and the like, through a socket ->

Results come in the order of the plan, whoever is done first.  A worker that ends, or is busy with
one image for too long, is killed and replaced, and its batches are made again: since a batch is a
function of its keys, none is lost, doubled or different.  A record that twice in a row was being
read at that moment is to blame and not opened again.

The memory of the slots is anonymous and inherited: /dev/shm, which is small in containers, is not
used.  A worker ends with its rank, however that one ends.
"""

import itertools
import logging
import math
import mmap
import os
import signal
import socket
import sys
import traceback
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing.connection import wait
from typing import TypeVar

import numpy as np

from ppdist import pulse
from ppdist.data.sample import SampleKey
from ppdist.data.samples import EXITED, HUNG, NOTHING, Arrays, Made, Samples
from ppdist.data.worker import LOOK_SECONDS, SLOTS, Result, Task, Worker, tie, work
from ppdist.errors import DataError

_LOGGER = logging.getLogger("ppdist.data")
_CULPRIT_FAILURES, _MOST_FAILURES = 2, 3

T = TypeVar("T")


class Pool:
    """Workers that make batches of one Samples, for one run of a plan after the other."""

    def __init__(
        self, samples: Samples, workers: int, largest_batch: int, timeout_seconds: float
    ) -> None:
        """
        Args:
            largest_batch: bytes of the images of the largest batch of any plan.
            timeout_seconds: a worker busy with one image for longer counts as hung.
        Raises: DataError: they cannot be started.
        """
        self._samples = samples
        self._bytes = max(1, largest_batch)
        self._timeout = timeout_seconds
        self._numbers = itertools.count()
        self._wanted: dict[int, Task] = {}  # of the present run, in its order, not yet taken
        self._done: dict[int, tuple[Made, Worker, int]] = {}
        # All workers see at once what one of them is not to open any more.
        samples.quarantine_N = _shared(len(samples), np.uint8)
        self._crew: list[Worker] = []
        self._end = weakref.finalize(self, _end, self._crew, os.getpid())  # also at exit
        try:
            for _ in range(workers):
                self._crew.append(self._hire())
        except OSError as error:
            self.close()
            raise DataError(
                f"the processes that prepare images cannot be started ({error.strerror or error})",
                code="workers_not_started",
                where="data.workers",
                fix="lower data.workers or train.batch_size_per_card",
            ) from error

    def close(self) -> None:
        """Ends the workers, for good; also done when the pool is let go of."""
        self._wanted = {}
        self._end()

    @property
    def process_ids(self) -> list[int]:
        return [worker.process for worker in self._crew if worker.process]

    def run(
        self, plan: Iterable[list[SampleKey]], take: Callable[[Made], T]
    ) -> Generator[tuple[list[SampleKey], T], None, None]:
        """The batches of a plan in its order; a run before it that has not ended cannot go on.

        Args:
            take: copies out what it needs of a batch, whose memory is then used again.
        Raises, while iterating: RuntimeError: a batch ended three workers, or its run is over.
        """
        for _, worker, slot in self._done.values():
            worker.free.append(slot)
        self._done.clear()
        wanted: dict[int, Task] = {}
        self._wanted, remaining = wanted, iter(plan)
        more = self._hand_out(remaining)
        while wanted or more:
            number = next(iter(wanted), None)
            if number is None or number not in self._done:
                self._listen()
                more = more and self._hand_out(remaining)
                continue
            made, worker, slot = self._done.pop(number)
            taken = take(made)
            worker.free.append(slot)
            task = wanted.pop(number)
            more = more and self._hand_out(remaining)
            yield task.keys, taken
            if self._wanted is not wanted:
                raise RuntimeError("this iteration is over: its loader was closed or iterated anew")

    def _hand_out(self, remaining: Iterator[list[SampleKey]]) -> bool:
        """Gives every free slot a batch, those of the least busy worker first.

        Returns: whether there may be more.
        """
        while free := [worker for worker in self._crew if worker.free]:
            keys = next(remaining, None)
            if keys is None:
                return False
            task = Task(next(self._numbers), keys)
            self._wanted[task.number] = task
            min(free, key=lambda worker: len(worker.tasks)).give(task)
        return True

    def _listen(self) -> None:
        """Takes in what workers have sent, and replaces those that have died or hang."""
        pulse.alive()  # who hangs here is a worker, and replaced below
        by_link = {worker.link.fileno(): worker for worker in self._crew}
        for link in wait([*by_link], min(LOOK_SECONDS, self._timeout)):
            assert isinstance(link, int)
            worker = by_link[link]
            alive, results = worker.hear()
            for result in results:
                self._note(worker, result)
            if not alive:
                self._replace(worker, hung=False)
        for worker in list(self._crew):
            if worker.busy_seconds() > self._timeout:
                self._replace(worker, hung=True)

    def _note(self, worker: Worker, result: Result) -> None:
        task, slot = worker.tasks.pop(result.number)
        if task.number not in self._wanted:  # of a run that was given up
            worker.free.append(slot)
            return
        made = result.made
        if result.shape:
            pixels = worker.slots[slot][: math.prod(result.shape)]
            images_B3HW = pixels.reshape(result.shape)
            made = made._replace(arrays=Arrays(images_B3HW, *result.small_arrays))
        self._done[task.number] = made, worker, slot

    def _replace(self, worker: Worker, hung: bool) -> None:
        code = worker.end()
        how = (
            f"was busy with one image for more than {self._timeout:g} s"
            if hung
            else f"ended with {_name(code)}"
        )
        index = int(worker.reading[0])
        where = "" if index == NOTHING else f" while reading {self._samples.path(index)}"
        place = self._crew.index(worker)
        lost = [task for task, _ in worker.tasks.values() if task.number in self._wanted]
        if lost:
            self._blame(lost[0], index, HUNG if hung else code, how)
        _LOGGER.warning(
            f"worker {place + 1} of {len(self._crew)}, which prepares images, {how}{where}; "
            f"another takes its place, and the batches it had not finished are made again"
        )
        try:
            self._crew[place] = replacement = self._hire()
        except OSError as error:
            raise RuntimeError(
                f"a worker that prepares images {how}, and no other can be started "
                f"({error.strerror or error}); the usual reason is memory: lower data.workers"
            ) from error
        for task in lost:
            replacement.give(task)

    def _blame(self, task: Task, index: int, code: int, how: str) -> None:
        """Puts the record at `index` in quarantine if it stopped this batch before.

        Raises: RuntimeError: the batch was stopped too often, and no record is to blame.
        """
        task.stopped_at.append(index)
        if index != NOTHING and task.stopped_at.count(index) >= _CULPRIT_FAILURES:
            self._samples.quarantine_N[index] = code
            task.stopped_at.clear()
        elif len(task.stopped_at) >= _MOST_FAILURES:
            first = next((key.index for key in task.keys if key.index >= 0), NOTHING)
            images = f"its first image is {self._samples.path(first)}; " if first >= 0 else ""
            raise RuntimeError(
                f"{_MOST_FAILURES} workers in a row failed to prepare the same batch of images, "
                f"the last {how}, and no one image is to blame; {images}if the disk is slow, "
                f"raise data.worker_timeout_seconds"
            )

    def _hire(self) -> Worker:
        """Forks a worker.  Raises: OSError: too little memory, or too many processes."""
        ours, theirs = socket.socketpair()
        slots = [_shared(self._bytes, np.uint8) for _ in range(SLOTS)]
        worker = Worker(ours, slots, _shared(1, np.int64), _shared(1, np.float64))
        worker.reading[0] = NOTHING
        ours.settimeout(self._timeout)
        rank, tied = os.getpid(), tie()
        worker.process = os.fork()
        if worker.process:
            theirs.close()
            return worker
        try:
            tied()
            ours.close()
            work(self._samples, worker, theirs, rank)
            code = 0
        except BaseException:  # nothing of the rank's own code may run in its copy
            traceback.print_exc()
            sys.stderr.flush()
            code = 1
        finally:
            os._exit(code)


def _shared(count: int, dtype: type[np.generic]) -> np.ndarray:
    """Zeros in memory that processes forked from now on share.  Raises: OSError."""
    memory = mmap.mmap(-1, max(1, count) * np.dtype(dtype).itemsize)
    return np.frombuffer(memory, dtype, count)


def _name(code: int) -> str:
    if code == signal.SIGKILL:
        return "SIGKILL (the usual reason is memory: lower data.workers)"
    return "an exit" if code == EXITED else signal.Signals(code).name


def _end(crew: list[Worker], rank: int) -> None:
    if os.getpid() == rank:  # and not a copy of it
        for worker in crew:
            worker.kill()
        for worker in crew:
            worker.end()
        crew.clear()

"""Runs the model in one thread, which answers waiting images in batches."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

_log = logging.getLogger("serving")


class Model(Protocol):
    """The interface of the predictor of ppdist/runtime/predictor.py."""

    spec: dict[str, Any]
    identity: dict[str, str]  # name, and sha256 of its file

    def __call__(self, images: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Predicts images.

        Args: images: uint8 RGB [H, W, 3].
        Returns: for each image rows_R6, or probabilities_C.
        """


class _Job:
    """An image and the future of its answer."""

    def __init__(self, image_HW3: np.ndarray) -> None:
        self.image_HW3 = image_HW3
        self.answer: Future[np.ndarray] = Future()


class Batcher:
    """The thread that makes, warms up and calls the model: runtimes keep settings by thread.

    A batch is taken when it is full, when every request under way is in it (so a single client
    never waits), or `most_delay` seconds after its first image.  The model gets it in parts of
    `sizes`: OpenVINO compiles a model for each size, which takes seconds and memory.

    Args:
        load: makes the model.
        most_images: limit of one batch.
        under_way: returns how many requests may still send an image, those in the batch included.
        measured: gets the images and the seconds of each batch.
    """

    def __init__(
        self,
        load: Callable[[], Model],
        most_images: int,
        most_delay: float,
        under_way: Callable[[], int],
        measured: Callable[[int, float], None],
    ) -> None:
        self.model: Model | None = None  # from warm-up to the end
        self.failure: Exception | None = None  # what ended the thread
        self.sizes = _sizes(most_images)
        self._load, self._most_images, self._most_delay = load, most_images, most_delay
        self._under_way, self._measured = under_way, measured
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._ended: Callable[[], None] = lambda: None

    def start(self, ended: Callable[[], None] = lambda: None) -> None:
        """Starts the thread.

        Args: ended: called in the thread when it ends, for whatever reason.
        """
        self._ended = ended
        self._thread.start()

    def submit(self, image_HW3: np.ndarray) -> "Future[np.ndarray]":
        """Submits an image; the future gives rows_R6 or probabilities_C.  Cancel it if nobody
        waits.
        """
        job = _Job(image_HW3)
        self._jobs.put(job)
        return job.answer

    def stop(self, seconds: float) -> None:
        """Answers what has been submitted, within so many seconds."""
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(seconds)

    def alive(self) -> bool:
        return self._thread.is_alive()

    def busy_seconds(self) -> float:
        """Returns how long the batch that is being computed has taken by now."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def waiting(self) -> int:
        return self._jobs.qsize()

    def _work(self) -> None:
        try:
            model = self._load()
            self._warm_up(model)
            self.model = model
            while self._answer(model, self._next_batch()):
                pass  # no variable keeps a batch's images alive while the next batch is awaited
        except Exception as error:  # serve() reports it and ends the process
            self.failure = error
        finally:
            self.model = None
            self._ended()

    def _warm_up(self, model: Model) -> None:
        """Runs each size once, because runtimes prepare it when they first see it."""
        height, width = model.spec["input"]["size"]
        for images in self.sizes:
            model([np.full((height, width, 3), 114, np.uint8)] * images)

    def _next_batch(self) -> list[_Job]:
        """Waits for images; returns an empty list at the end."""
        job = self._jobs.get()
        if job is None:
            return []
        batch, deadline = [job], time.monotonic() + self._most_delay
        while len(batch) < self._most_images:
            # Nobody else can send an image now, so waiting would only delay the answer.
            holds_all_requests = len(batch) >= self._under_way()
            try:
                job = self._jobs.get(
                    timeout=0 if holds_all_requests else max(0, deadline - time.monotonic())
                )
            except queue.Empty:
                break
            if job is None:
                self._jobs.put(None)  # the end comes after this batch
                break
            batch.append(job)
        return batch

    def _answer(self, model: Model, batch: list[_Job]) -> bool:
        """Answers a batch; returns False if the batch is the end."""
        waiting_jobs = [job for job in batch if job.answer.set_running_or_notify_cancel()]
        while waiting_jobs:
            size = next(size for size in self.sizes if size <= len(waiting_jobs))
            part, waiting_jobs = waiting_jobs[:size], waiting_jobs[size:]
            self._busy_since = started = time.monotonic()
            results = self._predict(model, part)
            self._busy_since = None
            # Before the answers, so that a client that has one finds it counted.
            self._measured(size, time.monotonic() - started)
            for job, result in zip(part, results, strict=True):
                if isinstance(result, Exception):
                    job.answer.set_exception(result)
                else:
                    job.answer.set_result(result)
        return bool(batch)

    def _predict(self, model: Model, batch: list[_Job]) -> list[Any]:
        """Predicts each image; an image that the model refuses fails alone, not with its whole
        batch.
        """
        try:
            return list(model([job.image_HW3 for job in batch]))
        except Exception as error:  # any error of a runtime goes to the waiting request
            if len(batch) == 1:
                return [error]
            _log.warning("a batch of %d failed (%s): image by image now", len(batch), error)
            return [result for job in batch for result in self._predict(model, [job])]


def _sizes(most_images: int) -> tuple[int, ...]:
    """Lists the sizes of batches, descending: `most_images`, and each smaller power of two."""
    powers = (2**power for power in range(most_images.bit_length()))
    return tuple(sorted({most_images, *powers}, reverse=True))

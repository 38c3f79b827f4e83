"""Handles a request for boxes, from its body to its answer, and counts requests."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from batching import Batcher, Model
from fastapi import Request
from ppdist_runtime.predictor import default_threshold
from prometheus_client import CollectorRegistry, Gauge, Histogram, Info, ProcessCollector
from uploads import Refused, decode, file_part

_log = logging.getLogger("serving")
_FORM_BYTES = 64 * 1024  # allowed in a multipart body besides its file
# Seconds, up to twice the default of --seconds, so that no quantile ends at the last bound.
_BUCKETS = (
    0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10,
    15, 20, 30, 45, 60,
)  # fmt: skip
_TOP = 5  # classes a classifier names
_GRACE_SECONDS = 5.0  # before Limits.least_rate applies to a body
_END_SECONDS = 5.0  # for the model's thread to end; nobody waits for its answers by then


@dataclass(frozen=True)
class Limits:
    """The limits of one process.

    Memory beyond the model's is at most most_waiting * most_bytes for images as they were sent, and
    2 * most_batch * most_pixels * 3 bytes for decoded ones.
    """

    most_batch: int = 8
    most_delay: float = 0.005  # seconds the first image of a batch waits for others
    most_waiting: int = 64  # requests in flight; more are rejected with 503
    most_bytes: int = 10 * 2**20  # of an image as it is sent
    most_pixels: int = 25_000_000  # of an image
    seconds: float = 30.0  # for a request, from its first byte to its answer
    least_rate: int = 10_000  # slowest upload of an image, bytes per second; 0: any
    header_seconds: float = 10.0  # for a connection to begin a request, the first or another
    write_seconds: float = 10.0  # for a client to read the part of an answer that fits in no buffer
    most_connections: int = 1000  # at once
    threshold: float | None = None  # lowest score of a box if the request names none; None: the
    # model's own, see `default_threshold` of deploy/python
    decoders: int = 2  # threads that decode images


class Counts:
    """The Prometheus metrics of one service; no label holds anything that a client chose."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        # Arguments that all metrics share.
        shared: dict[str, Any] = {"registry": self.registry, "namespace": "ppdist_serving"}
        self.seconds = Histogram(
            "request_seconds",
            "Of a request to /detect, from its headers to its answer, by the answer's status.",
            ["status"],
            buckets=_BUCKETS,
            **shared,
        )
        self.under_way = Gauge("requests_under_way", "Requests not answered yet.", **shared)
        self.waiting = Gauge("images_waiting", "Decoded images in no batch yet.", **shared)
        self.model = Info("model", "Name of the model, and the SHA-256 of its file.", **shared)
        self.ready = Gauge("ready", "1: the model is warm and answers.", **shared)
        self.images = Histogram(
            "batch_images", "Images in a batch.", buckets=(1, 2, 4, 8, 16, 32, 64), **shared
        )
        self.batch_seconds = Histogram("batch_seconds", "The model's time for a batch.", **shared)

    def batch(self, images: int, seconds: float) -> None:
        self.images.observe(images)
        self.batch_seconds.observe(seconds)


class Service:
    """The service behind the routes; it may be made in any thread and is used in one."""

    def __init__(self, load: Callable[[], Model], limits: Limits) -> None:
        """Prepares the threads and the counts.

        Args: load: called in the thread that will use the model.
        """
        self.limits, self.counts = limits, Counts()
        self.under_way = 0  # requests not answered yet
        self.batcher = Batcher(
            load, limits.most_batch, limits.most_delay, lambda: self.under_way, self.counts.batch
        )
        self.counts.under_way.set_function(lambda: self.under_way)
        self.counts.waiting.set_function(self.batcher.waiting)
        self.counts.ready.set_function(lambda: self.batcher.model is not None)
        self._decoders = ThreadPoolExecutor(limits.decoders, "decoder")
        self._decoding: dict[int, float] = {}  # thread -> time.monotonic() when it began
        self._decoded = asyncio.Semaphore(2 * limits.most_batch)

    def identity(self) -> dict[str, str] | None:
        """Returns the identity of the model; None: it is not ready."""
        return None if self.batcher.model is None else self.batcher.model.identity

    def stop(self) -> None:
        """Ends the threads without waiting for a busy decoder."""
        self._decoders.shutdown(wait=False, cancel_futures=True)
        self.batcher.stop(_END_SECONDS)

    def find_problem(self) -> str | None:
        """Returns why this process should be restarted; None: it works."""
        if not self.batcher.alive():
            return "the thread of the model has ended"
        busy = self.batcher.busy_seconds()
        if busy > self.limits.seconds:
            return f"the model has been computing one batch for {busy:.0f} s"
        began = list(self._decoding.values())  # copied at once: the decoders change it
        busy = time.monotonic() - min(began) if began else 0.0
        if busy > self.limits.seconds:
            return f"one image has been decoded for {busy:.0f} s"
        return None

    async def answer(self, request: Request, threshold: float | None) -> dict[str, Any]:
        """Detects the objects in a request's image, as JSON data.

        Raises: Refused: 400 to 422: invalid request; 408: its body, 504: its answer took too long;
            503: the service is busy or stopping.
        """
        if self.batcher.model is None:
            raise Refused(503, "the model is not ready yet")
        if self.under_way >= self.limits.most_waiting:
            raise Refused(503, f"{self.under_way} requests are already in flight; retry soon")
        began = time.monotonic()
        # Counted from here on, so that the batcher can wait for images that are still being sent.
        self.under_way += 1
        try:
            body = await self._read_body(request, began)
            detection = self._detect(_content_type(request), body, threshold)
            try:
                seconds_left = began + self.limits.seconds - time.monotonic()
                return await asyncio.wait_for(detection, seconds_left)
            except asyncio.TimeoutError as error:
                raise Refused(504, "the answer took too long") from error
        finally:
            self.under_way -= 1

    async def _read_body(self, request: Request, began: float) -> bytes:
        """Reads an image, or a form around one, within the limits of size and rate."""
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise Refused(415, "compressed bodies are not read; send the image file as it is")
        is_form = _is_form(_content_type(request))
        max_bytes = self.limits.most_bytes + (_FORM_BYTES if is_form else 0)
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > max_bytes:
            raise self._too_large()
        # A slow upload would hold its place among the requests in flight for the whole time limit.
        rate, deadline = self.limits.least_rate, began + self.limits.seconds
        body, stream = bytearray(), request.stream()
        while True:
            at_rate = began + _GRACE_SECONDS + len(body) / rate if rate else math.inf
            try:
                seconds_left = min(deadline, at_rate) - time.monotonic()
                body += await asyncio.wait_for(anext(stream), seconds_left)
            except StopAsyncIteration:
                return bytes(body)
            except asyncio.TimeoutError as error:
                raise Refused(
                    408,
                    f"the image comes more slowly than {rate} bytes a second"
                    if at_rate < deadline
                    else "sending the image took too long",
                ) from error
            if len(body) > max_bytes:
                raise self._too_large()

    def _too_large(self) -> Refused:
        return Refused(413, f"more than the {self.limits.most_bytes} bytes allowed here")

    def _decode_image(self, content_type: str, body: bytes) -> np.ndarray:
        """Decodes the image of a request as uint8 RGB [H, W, 3]; called in a decoder's thread."""
        thread = threading.get_ident()
        self._decoding[thread] = time.monotonic()
        try:
            content = file_part(content_type, body) if _is_form(content_type) else body
            if len(content) > self.limits.most_bytes:
                raise self._too_large()
            return decode(content, self.limits.most_pixels)
        finally:
            del self._decoding[thread]

    async def _detect(
        self, content_type: str, body: bytes, threshold: float | None
    ) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        # Bounds the decoded images in memory, which are far larger than the bodies.
        async with self._decoded:
            image_HW3 = await loop.run_in_executor(
                self._decoders, self._decode_image, content_type, body
            )
            try:
                result = await asyncio.wrap_future(self.batcher.submit(image_HW3))
            except ValueError as error:  # the predictor's, for images that it cannot take
                _log.warning("an image of shape %s: %s", image_HW3.shape, error)
                raise Refused(422, "the model cannot take this image") from error
        model = self.batcher.model
        if model is None:
            raise Refused(503, "the service is stopping")
        height, width = image_HW3.shape[:2]
        if threshold is None:
            threshold, _ = default_threshold(model.spec)
        description = describe_result(model.spec, result, threshold)
        return {"width": width, "height": height, "model": model.identity, **description}


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "")


def _is_form(content_type: str) -> bool:
    return content_type.lower().startswith("multipart/form-data")


def describe_result(spec: dict[str, Any], result: np.ndarray, threshold: float) -> dict[str, Any]:
    """Describes a result with names: `objects`, or a classifier's surest `classes`.

    Args: result: rows_R6 (class, score, xyxy pixels of the image), or probabilities_C.
    """
    names, ids = spec["class_names"], spec["category_ids"]

    def named(label: int, score: float) -> dict[str, Any]:
        return {"class": names[label], "category_id": ids[label], "score": round(float(score), 5)}

    if spec["task"] == "classify":
        best = np.argsort(-result, kind="stable")[:_TOP]
        return {"classes": [named(int(label), result[label]) for label in best]}
    return {
        "objects": [
            {**named(int(row[0]), row[1]), "box": [round(float(side), 2) for side in row[2:]]}
            for row in result
            if row[1] >= threshold
        ]
    }

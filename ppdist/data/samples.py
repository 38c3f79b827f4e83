"""What one sample is: an image at input size and its objects; how evaluation makes it.

Runs in the loader's workers, so everything here is numpy.
"""

import math
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np

from ppdist.config.data import Resize
from ppdist.data.augment.transforms import fitted, map_boxes, resize_for_evaluation
from ppdist.data.cache import ImageCache
from ppdist.data.images import read_image
from ppdist.data.sample import DetectionSet, SampleKey
from ppdist.errors import DataError

NOTHING = -1  # no record is being read
HUNG = 255  # quarantine: not a signal, but none at all for too long
EXITED = 254  # quarantine: not a signal either, but an exit
_BOX_ROUNDING = 8  # boxes per image are padded to a multiple, so that shapes repeat


class Arrays(NamedTuple):
    """A batch in numpy; see Batch."""

    images_B3HW: np.ndarray
    boxes_BM4: np.ndarray
    labels_BM: np.ndarray
    mask_BM: np.ndarray
    image_index_B: np.ndarray
    scale_B2: np.ndarray
    offset_B2: np.ndarray


@dataclass(frozen=True)
class Sample:
    """One image at input size and its objects."""

    image_HW3: np.ndarray
    boxes_M4: np.ndarray
    labels_M: np.ndarray
    index: int
    scale: tuple[float, float] = (1.0, 1.0)
    offset: tuple[float, float] = (0.0, 0.0)


class Made(NamedTuple):
    """What came of the keys of a batch.

    arrays: None if an error is given; problems: lines to warn of; bad_images: position in the set's
    records -> why, without the path, of those that could not be used; user_error: a user's mistake,
    or None; our_error: our own as text with its traceback, or "".  All of it crosses processes.
    """

    arrays: Arrays | None
    problems: list[str]
    bad_images: dict[int, str]
    user_error: DataError | None = None
    our_error: str = ""


class Samples:
    """Makes whole micro-batches of keys.

    reading: int64 [1], position of the record that is being read, or NOTHING; beat: float64 [1],
    when reading one last began (time.monotonic); quarantine_N: uint8, what twice came of reading a
    record: 0, a signal, HUNG or EXITED.  A worker has all in memory that it shares with its rank,
    which thus knows what a worker died of, or that it hangs.
    """

    def __init__(
        self,
        dataset: DetectionSet,
        bad_images: str,
        *,
        reductions_N: np.ndarray | None = None,
        cache: ImageCache | None = None,
    ) -> None:
        """
        Args:
            bad_images: what to do about an image that cannot be read: `skip` or `error`.
            reductions_N: uint8, how far each image is reduced when it is read; None: not at all.
            cache: of images reduced like this.
        """
        self.reading = np.full(1, NOTHING, np.int64)
        self.beat = np.zeros(1)
        self.quarantine_N = np.zeros(len(dataset.records), np.uint8)
        self._dataset = dataset
        self._bad_images = bad_images
        count = len(dataset.records)
        self._reductions_N = np.ones(count, np.uint8) if reductions_N is None else reductions_N
        self._cache = cache
        self._problems: list[str] = []  # of this batch
        self._bad: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._dataset.records)

    def path(self, index: int) -> str:
        """Of the image of a record."""
        return self._dataset.records[index].path

    def batch(self, keys: Sequence[SampleKey], out: np.ndarray | None = None) -> Made:
        """Args: keys: all of one shape; out: uint8 [at least B*3*H*W], where the images go."""
        self._problems, self._bad = [], {}
        key = keys[0]
        try:
            samples = []
            for key in keys:
                samples.append(self.make(key) if key.index >= 0 else _padding(key))
            return Made(collate(samples, out), self._problems, self._bad)
        except DataError as error:
            return Made(None, [], {}, user_error=error)
        except (OSError, cv2.error, MemoryError) as error:
            why = DataError(
                f"{type(error).__name__}: {error}",
                code="image_unreadable",
                where=self.path(key.index),
            )
            return Made(None, [], {}, user_error=why)
        except Exception:
            text = f"{self.path(key.index)}: loading failed\n{traceback.format_exc()}"
            return Made(None, [], {}, our_error=text)

    def make(self, key: SampleKey) -> Sample:
        raise NotImplementedError

    def _read(self, index: int, consequence: str) -> np.ndarray | None:
        """The image, reduced, perhaps read-only; or None with a note of what that entails.

        Raises: DataError: it cannot be read and data.bad_images is `error`.
        """
        path = self.path(index)
        code, why = "image_unreadable", self._dataset.unreadable.get(index, "")
        if not why:
            code, why = _quarantined(self.quarantine_N[index])
        if not why:
            self.reading[0], self.beat[0] = index, time.monotonic()
            try:
                return self._pixels(index)
            except DataError as error:
                code, why = error.code, error.what
            finally:
                self.reading[0] = NOTHING
        if self._bad_images == "error":
            fix = "remove it, or set data.bad_images: skip"
            raise DataError(why, code=code, where=path, fix=fix)
        self._problems.append(f"{path}: {why}; {consequence}")
        self._bad[index] = why
        return None

    def _pixels(self, index: int) -> np.ndarray:
        cached_HW3 = None if self._cache is None else self._cache.get(index)
        if cached_HW3 is not None:
            return cached_HW3
        record = self._dataset.records[index]
        size = (record.height, record.width) if record.height else None  # 0: not known
        image_HW3 = read_image(record.path, size, int(self._reductions_N[index]))
        if self._cache is not None:
            self._cache.put(index, image_HW3)
        return image_HW3


class EvalSamples(Samples):
    """The whole image in the input, and all its boxes, crowds too."""

    def __init__(
        self, dataset: DetectionSet, bad_images: str, *, resize: Resize = "stretch"
    ) -> None:
        super().__init__(dataset, bad_images)
        self._resize: Resize = resize

    def make(self, key: SampleKey) -> Sample:
        record = self._dataset.records[key.index]
        size = key.height, key.width
        image_HW3 = self._read(key.index, "evaluation sees a blank image in its place")
        input_HW3 = (
            np.zeros((*size, 3), np.uint8)
            if image_HW3 is None
            else resize_for_evaluation(image_HW3, size, self._resize)
        )
        placement = fitted(record.width, record.height, size, self._resize)
        boxes_M4, _ = map_boxes(record.boxes_M4, placement)
        left, top, _, _ = placement.target
        return Sample(input_HW3, boxes_M4, record.labels_M, key.index, placement.scale, (top, left))

    def learnable(self, key: SampleKey) -> tuple[np.ndarray, np.ndarray]:
        """boxes_M4 and labels_M of what training would learn of this very input, which leaves out
        crowds and what is too small; the image is not read."""
        record = self._dataset.records[key.index]
        placement = fitted(record.width, record.height, (key.height, key.width), self._resize)
        boxes_M4, keep_M = map_boxes(record.boxes_M4, placement)
        learnt_M = keep_M & ~record.crowd_M
        return boxes_M4[learnt_M], record.labels_M[learnt_M]


def _quarantined(ended: int) -> tuple[str, str]:
    """Code and text of why a record is never opened again; "", "" if it may be."""
    if not ended:
        return "", ""
    if ended == HUNG:
        why = "reading it took a worker longer than data.worker_timeout_seconds, twice"
        return "image_hangs_decoder", why
    how = "" if ended == EXITED else f" with {signal.Signals(ended).name}"
    return "image_crashes_decoder", f"reading it ended a worker{how}, twice"


def _padding(key: SampleKey) -> Sample:
    image_HW3 = np.zeros((key.height, key.width, 3), np.uint8)
    return Sample(image_HW3, np.zeros((0, 4), np.float32), np.zeros(0, np.int64), -1)


def collate(samples: Sequence[Sample], out: np.ndarray | None = None) -> Arrays:
    """Stacks samples; boxes are padded with zeros to a common multiple of 8, at least 8.

    Args:
        samples: all of one shape.
        out: uint8 [at least B*3*H*W], where the images go; None: into memory of their own.
    """
    shape = samples[0].image_HW3.shape
    assert all(sample.image_HW3.shape == shape for sample in samples), "one shape a batch"
    count, size = len(samples), math.prod(shape)
    pixels = np.empty(count * size, np.uint8) if out is None else out[: count * size]
    images_B3HW = pixels.reshape(count, 3, *shape[:2])
    for position, sample in enumerate(samples):
        cv2.split(sample.image_HW3, [*images_B3HW[position]])  # 10 times as fast as a transpose
    return Arrays(
        images_B3HW,
        *padded([(sample.boxes_M4, sample.labels_M) for sample in samples]),
        np.array([sample.index for sample in samples], np.int64),
        np.array([sample.scale for sample in samples], np.float32),
        np.array([sample.offset for sample in samples], np.float32),
    )


def padded(
    objects_B: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """boxes_BM4, labels_BM and mask_BM of (boxes_M4, labels_M) of each image; see `collate`."""
    most = max(1, *(len(labels_M) for _, labels_M in objects_B))
    room = -(-most // _BOX_ROUNDING) * _BOX_ROUNDING
    boxes_BM4 = np.zeros((len(objects_B), room, 4), np.float32)
    labels_BM = np.zeros((len(objects_B), room), np.int64)
    mask_BM = np.zeros((len(objects_B), room), np.float32)
    for position, (boxes_M4, labels_M) in enumerate(objects_B):
        boxes_BM4[position, : len(labels_M)] = boxes_M4
        labels_BM[position, : len(labels_M)] = labels_M
        mask_BM[position, : len(labels_M)] = 1.0
    return boxes_BM4, labels_BM, mask_BM

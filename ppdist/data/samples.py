"""What one sample is: an image at input size and its objects; how evaluation makes it.

Runs in the loader's workers, so everything here is numpy.
"""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cv2
import numpy as np
from paddle.io import Dataset

from ppdist.data.images import read_image
from ppdist.data.sample import DetectionSet, SampleKey
from ppdist.data.transforms import (
    Resize,
    fitted,
    map_boxes,
    resize_for_evaluation,
)
from ppdist.errors import DataError

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


class Samples(Dataset):
    """Makes whole micro-batches of keys; problems travel back as text beside the arrays."""

    def __init__(self, dataset: DetectionSet, bad_images: str) -> None:
        self._dataset = dataset
        self._bad_images = bad_images
        self._problems: list[str] = []

    def __len__(self) -> int:
        return len(self._dataset.records)

    def __getitem__(self, keys: list[SampleKey]) -> list[Any]:
        """[arrays, problems to warn of, a user's error, our error]; the errors are "" or text.

        Paddle reports an exception of a worker as a SystemError without its text, so none leaves.
        """
        nothing = np.zeros(1, np.uint8)
        self._problems = []
        key = keys[0]
        try:
            samples = []
            for key in keys:
                samples.append(self.make(key) if key.index >= 0 else _padding(key))
            return [[*collate(samples)], self._problems, "", ""]
        except DataError as error:
            return [[nothing], [], str(error), ""]
        except (OSError, cv2.error, MemoryError) as error:
            path = self._dataset.records[key.index].path
            return [[nothing], [], f"{path}: {type(error).__name__}: {error}", ""]
        except Exception:
            path = self._dataset.records[key.index].path
            return [[nothing], [], "", f"{path}: loading failed\n{traceback.format_exc()}"]

    def make(self, key: SampleKey) -> Sample:
        raise NotImplementedError

    def _read(self, index: int, consequence: str, reduced: int = 1) -> np.ndarray | None:
        """The image, reduced as `read_image` does, or None with a note of what that entails.

        Raises: DataError: it cannot be read and data.bad_images is `error`.
        """
        record = self._dataset.records[index]
        size = (record.height, record.width) if record.height else None  # 0: not known
        try:
            return read_image(record.path, size, reduced)
        except DataError as error:
            if self._bad_images == "error":
                raise DataError(f"{error}; remove it, or set data.bad_images: skip") from error
            self._problems.append(f"{error}; {consequence}")
            return None


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


def _padding(key: SampleKey) -> Sample:
    image_HW3 = np.zeros((key.height, key.width, 3), np.uint8)
    return Sample(image_HW3, np.zeros((0, 4), np.float32), np.zeros(0, np.int64), -1)


def collate(samples: Sequence[Sample]) -> Arrays:
    """Stacks samples; boxes are padded with zeros to a common multiple of 8, at least 8."""
    most = max(1, *(len(sample.labels_M) for sample in samples))
    padded = -(-most // _BOX_ROUNDING) * _BOX_ROUNDING
    height, width = samples[0].image_HW3.shape[:2]
    images_B3HW = np.empty((len(samples), 3, height, width), np.uint8)
    boxes_BM4 = np.zeros((len(samples), padded, 4), np.float32)
    labels_BM = np.zeros((len(samples), padded), np.int64)
    mask_BM = np.zeros((len(samples), padded), np.float32)
    for position, sample in enumerate(samples):
        count = len(sample.labels_M)
        for channel, plane_HW in enumerate(images_B3HW[position]):
            cv2.extractChannel(sample.image_HW3, channel, dst=plane_HW)
        boxes_BM4[position, :count] = sample.boxes_M4
        labels_BM[position, :count] = sample.labels_M
        mask_BM[position, :count] = 1.0
    return Arrays(
        images_B3HW,
        boxes_BM4,
        labels_BM,
        mask_BM,
        np.array([sample.index for sample in samples], np.int64),
        np.array([sample.scale for sample in samples], np.float32),
        np.array([sample.offset for sample in samples], np.float32),
    )

"""The contract between readers, loaders, trainers and evaluators."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from paddle import Tensor


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """One annotated image; boxes are xyxy in pixels of the original image, inside it.

    path is absolute.  boxes_M4 float32; labels_M int64 in [0, C); crowd_M bool, a box around many
    objects at once; area_M float32 square pixels, COCO's `area` or else that of the box.
    polygons_M: the outlines of each object, float32 [K, 2] x y in the same pixels, none where there
    is no mask; empty as a whole where masks were not asked for.
    """

    path: str
    image_id: int
    width: int
    height: int
    boxes_M4: np.ndarray
    labels_M: np.ndarray
    crowd_M: np.ndarray
    area_M: np.ndarray
    polygons_M: tuple[tuple[np.ndarray, ...], ...] = ()


@dataclass(frozen=True)
class DetectionSet:
    """A split: its images and what its classes are called.

    category_ids: what a COCO result file calls each class; source: the file or folder that a
    message about this set names; notes: one line for each kind of defect that was put right;
    limited: a line about `data.*.limit`, empty where none is set; unreadable: position in records
    -> why that image is never to be opened (a check found it), without its path, which may be
    another on another host.
    """

    records: Sequence[ImageRecord]
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]
    source: str
    notes: tuple[str, ...] = ()
    limited: str = ""
    unreadable: Mapping[int, str] = field(default_factory=dict)


EMPTY = -2


@dataclass(frozen=True, slots=True)
class SampleKey:
    """Everything a worker needs to make one sample.

    index -1 stands for no image (padding), EMPTY for none on any rank.  copy: 0, 1, ... where an
    epoch has an image more than once.
    """

    epoch: int
    index: int
    height: int
    width: int
    copy: int = 0

    @property
    def stream(self) -> tuple[int, ...]:
        """What a sample's random numbers depend on, besides the seed."""
        return (self.epoch, self.index, self.copy) if self.copy else (self.epoch, self.index)


@dataclass(frozen=True)
class Batch:
    """Images of one micro-batch of one rank, padded to the same number of boxes.

    images_B3HW: uint8 RGB.
    boxes_BM4: float32 xyxy in input pixels, zero padded; M >= 1 even without any object.
    labels_BM: int64; mask_BM: float32, 1 for a box, 0 for padding.
    image_index_B: int64 position in DetectionSet.records, -1 for padding.
    scale_B2, offset_B2: float32 (y, x): original pixels * scale + offset = input pixels; in
        evaluation only (training: ones and zeros).
    real: False for a batch of one blank image, which only keeps a rank in step with the others
        where an epoch's last images did not suffice for all.
    real_somewhere: False where no rank has an image.
    bad_images: position in DetectionSet.records -> why, of the images met here that could not be
        used; the path, which may differ between hosts, is not part of why.
    """

    images_B3HW: Tensor
    boxes_BM4: Tensor
    labels_BM: Tensor
    mask_BM: Tensor
    image_index_B: Tensor
    scale_B2: Tensor
    offset_B2: Tensor
    real: bool = True
    real_somewhere: bool = True
    bad_images: Mapping[int, str] = field(default_factory=dict)


def keyed_generator(seed: int, *key: int) -> np.random.Generator:
    """A random generator that is a function of (seed, key) alone, on every machine.

    Keys of different length never give the same stream (SeedSequence's spawn_key).
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)))

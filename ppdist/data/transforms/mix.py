"""Several images in one input: mosaic, mixup, cutmix, copy-paste.

Sources: mosaic of YOLOv4 (Bochkovskiy et al. 2020, arXiv:2004.10934, section 3.3), four images as
YOLOv5 lays them out; whole images in a grid: the mosaic of Dense O2O (DEIM, Huang et al. 2024,
arXiv:2412.04234), four images of half the input's sides; mixup (Zhang et al. 2017,
arXiv:1710.09412) of detections (Zhang et al. 2019, arXiv:1902.04103), whose objects all count in
full; CutMix (Yun et al. 2019, arXiv:1905.04899, section 3.1); copy-paste (Ghiasi et al. 2020,
arXiv:2012.07177, section 3).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import cv2
import numpy as np

from ppdist.data.transforms.color import behind, left_of
from ppdist.data.transforms.geometry import corners, map_points
from ppdist.data.types import Sample

_MIXUP_BETA = 32.0  # both parameters of the Beta distribution: nearly half and half
_PASTED = 0.5  # chance of each object
_SUBPIXELS = 4  # bits


class PasteSource(NamedTuple):
    """Sample with exact places of its objects, in input pixels, x y.

    outlines_M: the outlines of each object, [K, 2] each; none where it has no mask.
    seen_42: the corners of all that is seen of its image.
    """

    sample: Sample
    outlines_M: Sequence[Sequence[np.ndarray]]
    seen_42: np.ndarray

    @classmethod
    def of(
        cls,
        sample: Sample,
        outlines_M: Sequence[Sequence[np.ndarray]],
        kept: np.ndarray,
        source: Sequence[float],
        matrix_33: np.ndarray,
    ) -> "PasteSource":
        """
        Args:
            outlines_M: of all objects of the original, in its pixels; empty: none has any.
            kept: the positions of those that are objects of the sample.
            source: the part (x1, y1, x2, y2) of the original that is seen, before matrix_33.
            matrix_33: pixels of the original -> pixels of the input.
        """
        outlines = [
            [map_points(outline_K2, matrix_33) for outline_K2 in outlines_M[number]]
            for number in (kept.tolist() if outlines_M else ())
        ]
        return cls(sample, outlines, corners(source, matrix_33))


def mixup(one: Sample, other: Sample, rng: np.random.Generator) -> Sample:
    """Blends two samples by a Beta(32, 32) share; all objects stay."""
    share = rng.beta(_MIXUP_BETA, _MIXUP_BETA)
    mixed_HW3 = cv2.addWeighted(one.image_HW3, share, other.image_HW3, 1 - share, 0)
    return _with_objects(replace(one, image_HW3=mixed_HW3), other.boxes_M4, other.labels_M)


def cutmix(one: Sample, other: Sample, rng: np.random.Generator) -> Sample:
    """Replaces a rectangle of one input, with its objects, by another's.

    The rectangle is shaped like the input, its area uniform in 0 to all of it, its middle anywhere.
    """
    size = np.array(one.image_HW3.shape[:2])
    sides = size * math.sqrt(rng.random())
    middle = rng.random(2) * size
    top, left = np.rint(middle - sides / 2).clip(0, size).astype(int).tolist()
    bottom, right = np.rint(middle + sides / 2).clip(0, size).astype(int).tolist()
    other_HW = np.zeros(one.image_HW3.shape[:2], np.uint8)
    other_HW[top:bottom, left:right] = 1
    image_HW3 = one.image_HW3.copy()
    image_HW3[top:bottom, left:right] = other.image_HW3[top:bottom, left:right]
    boxes_M4, keep_M = left_of(other.boxes_M4, 1 - other_HW)
    return _with_objects(
        behind(replace(one, image_HW3=image_HW3), other_HW),
        boxes_M4[keep_M],
        other.labels_M[keep_M],
    )


def copy_paste(one: Sample, donor: PasteSource, rng: np.random.Generator) -> Sample:
    """Pastes half of another's outlined objects at their places."""
    given_M = np.array([len(outlines) > 0 for outlines in donor.outlines_M], bool)
    chosen_M = (rng.random(len(given_M)) < _PASTED) & given_M
    if not chosen_M.any():
        return one
    pasted_HW = np.zeros(one.image_HW3.shape[:2], np.uint8)
    for number in np.flatnonzero(chosen_M).tolist():
        for outline_K2 in donor.outlines_M[number]:
            _fill(pasted_HW, outline_K2)
    seen_HW = np.zeros_like(pasted_HW)
    _fill(seen_HW, donor.seen_42)
    pasted_HW &= seen_HW
    image_HW3 = one.image_HW3.copy()
    cv2.copyTo(donor.sample.image_HW3, pasted_HW, image_HW3)
    return _with_objects(
        behind(replace(one, image_HW3=image_HW3), pasted_HW),
        donor.sample.boxes_M4[chosen_M],
        donor.sample.labels_M[chosen_M],
    )


def _with_objects(sample: Sample, boxes_M4: np.ndarray, labels_M: np.ndarray) -> Sample:
    return replace(
        sample,
        boxes_M4=np.concatenate([sample.boxes_M4, boxes_M4]),
        labels_M=np.concatenate([sample.labels_M, labels_M]),
    )


def _fill(mask_HW: np.ndarray, outline_K2: np.ndarray) -> None:
    """Sets pixels with their middle inside an outline to 1, in place.

    The outline (x, y) may reach beyond the mask, and need not be convex.
    """
    middles_K2 = np.rint((outline_K2 - 0.5) * 2**_SUBPIXELS).astype(np.int32)
    cv2.fillPoly(mask_HW, [middles_K2], 1, shift=_SUBPIXELS)


# --- mosaic --------------------------------------------------------------------------------------

MOSAIC_IMAGES = 4


class Slot(NamedTuple):
    """Place in a mosaic.

    (x, y) in canvas pixels, and the share of the image before it.
    """

    x: float
    y: float
    before_x: float
    before_y: float

    def tile(self, height: int, width: int) -> tuple[float, float, float, float]:
        """Where an image lies (x1, y1, x2, y2), in canvas pixels.

        Args: height, width: of the image.
        """
        left, top = self.x - self.before_x * width, self.y - self.before_y * height
        return left, top, left + width, top + height


class Layout(NamedTuple):
    """Layout of a mosaic on its canvas, in canvas pixels (height, width).

    cell: what each image is fitted to.
    slots: the places of the images, row by row; they never overlap.
    """

    canvas: tuple[int, int]
    cell: tuple[int, int]
    slots: list[Slot]


def random_layout(whole: bool, size: tuple[int, int], rng: np.random.Generator) -> Layout:
    """Random layout of four images for the input.

    Args:
        size: (height, width) of the input.
        whole: in a grid, for which nothing is drawn.
    """
    return in_a_grid(size) if whole else around_a_point(size, rng)


def in_a_grid(size: tuple[int, int]) -> Layout:
    """Mosaic of 2 x 2 cells that fill the input, an image in each."""
    slots = [
        Slot((column + 0.5) * size[1] / 2, (row + 0.5) * size[0] / 2, 0.5, 0.5)
        for row in range(2)
        for column in range(2)
    ]
    return Layout(size, (size[0] // 2, size[1] // 2), slots)


def around_a_point(size: tuple[int, int], rng: np.random.Generator) -> Layout:
    """Mosaic of four images that touch a random point.

    Each is as large as the input; the point lies within the inner half of the canvas.
    """
    y, x = rng.uniform(0.5, 1.5, 2) * size
    slots = [Slot(x, y, *before) for before in ((1, 1), (0, 1), (1, 0), (0, 0))]
    return Layout((2 * size[0], 2 * size[1]), size, slots)

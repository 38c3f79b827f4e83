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

from ppdist.data.transforms.color import clip_to_visible, drop_hidden_objects
from ppdist.data.transforms.geometry import map_corners, map_points
from ppdist.data.types import Sample

_MIXUP_BETA = 32.0  # both parameters of the Beta distribution: nearly half and half
_PASTED = 0.5  # chance of an object to be pasted
_SUBPIXELS = 4  # bits


class PasteSource(NamedTuple):
    """A sample with the outlines of its objects, in input pixels, x y.

    outlines_M: the outlines of each object, [K, 2] each; none where it has no mask.
    seen_42: the corners of the visible part of its image.
    """

    sample: Sample
    outlines_M: Sequence[Sequence[np.ndarray]]
    seen_42: np.ndarray

    @classmethod
    def of(
        cls,
        sample: Sample,
        outlines_M: Sequence[Sequence[np.ndarray]],
        positions: np.ndarray,
        source: Sequence[float],
        matrix_33: np.ndarray,
    ) -> "PasteSource":
        """Maps the outlines of an image into the input.

        Args:
            outlines_M: outlines of all objects of the original, in its pixels; empty if there are
                none.
            positions: positions in the original of the objects that the sample keeps.
            source: the part (x1, y1, x2, y2) of the original that is visible, before matrix_33.
            matrix_33: pixels of the original -> pixels of the input.
        """
        outlines = [
            [map_points(outline_K2, matrix_33) for outline_K2 in outlines_M[number]]
            for number in (positions.tolist() if outlines_M else ())
        ]
        return cls(sample, outlines, map_corners(source, matrix_33))


def mixup(first: Sample, second: Sample, rng: np.random.Generator) -> Sample:
    """Blends two samples with a Beta(32, 32) share; keeps all objects."""
    share = rng.beta(_MIXUP_BETA, _MIXUP_BETA)
    mixed_HW3 = cv2.addWeighted(first.image_HW3, share, second.image_HW3, 1 - share, 0)
    return _add_objects(replace(first, image_HW3=mixed_HW3), second.boxes_M4, second.labels_M)


def cutmix(base: Sample, donor: Sample, rng: np.random.Generator) -> Sample:
    """Replaces a rectangle of one input, with its objects, by the same rectangle of another.

    The rectangle has the aspect of the input, an area uniform between 0 and all of it, and its
    middle anywhere.
    """
    size = np.array(base.image_HW3.shape[:2])
    sides = size * math.sqrt(rng.random())
    middle = rng.random(2) * size
    top, left = np.rint(middle - sides / 2).clip(0, size).astype(int).tolist()
    bottom, right = np.rint(middle + sides / 2).clip(0, size).astype(int).tolist()
    donor_HW = np.zeros(base.image_HW3.shape[:2], np.uint8)
    donor_HW[top:bottom, left:right] = 1
    image_HW3 = base.image_HW3.copy()
    image_HW3[top:bottom, left:right] = donor.image_HW3[top:bottom, left:right]
    boxes_M4, keep_M = clip_to_visible(donor.boxes_M4, 1 - donor_HW)
    return _add_objects(
        drop_hidden_objects(replace(base, image_HW3=image_HW3), donor_HW),
        boxes_M4[keep_M],
        donor.labels_M[keep_M],
    )


def copy_paste(base: Sample, donor: PasteSource, rng: np.random.Generator) -> Sample:
    """Pastes each outlined object of another sample, with a chance of one half, where it is."""
    given_M = np.array([len(outlines) > 0 for outlines in donor.outlines_M], bool)
    chosen_M = (rng.random(len(given_M)) < _PASTED) & given_M
    if not chosen_M.any():
        return base
    pasted_HW = np.zeros(base.image_HW3.shape[:2], np.uint8)
    for number in np.flatnonzero(chosen_M).tolist():
        for outline_K2 in donor.outlines_M[number]:
            _fill(pasted_HW, outline_K2)
    seen_HW = np.zeros_like(pasted_HW)
    _fill(seen_HW, donor.seen_42)
    pasted_HW &= seen_HW
    image_HW3 = base.image_HW3.copy()
    cv2.copyTo(donor.sample.image_HW3, pasted_HW, image_HW3)
    return _add_objects(
        drop_hidden_objects(replace(base, image_HW3=image_HW3), pasted_HW),
        donor.sample.boxes_M4[chosen_M],
        donor.sample.labels_M[chosen_M],
    )


def _add_objects(sample: Sample, boxes_M4: np.ndarray, labels_M: np.ndarray) -> Sample:
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
    """The position of an image in a mosaic.

    x, y: a point in canvas pixels.  before_x, before_y: fraction of the image left of and above it.
    """

    x: float
    y: float
    before_x: float
    before_y: float

    def tile(self, height: int, width: int) -> tuple[float, float, float, float]:
        """Returns the box (x1, y1, x2, y2) of an image at this position, in canvas pixels.

        Args: height, width: of the image.
        """
        left, top = self.x - self.before_x * width, self.y - self.before_y * height
        return left, top, left + width, top + height


class Layout(NamedTuple):
    """The layout of a mosaic on its canvas, in canvas pixels (height, width).

    cell: the size that each image is fitted to.
    slots: the positions of the images, row by row; images never overlap.
    """

    canvas: tuple[int, int]
    cell: tuple[int, int]
    slots: list[Slot]


def random_layout(grid: bool, size: tuple[int, int], rng: np.random.Generator) -> Layout:
    """Draws a layout of four images for the input.

    Args:
        size: (height, width) of the input.
        grid: lays the images out in a grid, for which no random number is drawn.
    """
    return grid_layout(size) if grid else point_layout(size, rng)


def grid_layout(size: tuple[int, int]) -> Layout:
    """Lays out a mosaic in 2 x 2 cells that fill the input, an image in each."""
    slots = [
        Slot((column + 0.5) * size[1] / 2, (row + 0.5) * size[0] / 2, 0.5, 0.5)
        for row in range(2)
        for column in range(2)
    ]
    return Layout(size, (size[0] // 2, size[1] // 2), slots)


def point_layout(size: tuple[int, int], rng: np.random.Generator) -> Layout:
    """Lays out four images that touch a random point.

    Each is as large as the input; the point lies within the inner half of the canvas.
    """
    y, x = rng.uniform(0.5, 1.5, 2) * size
    slots = [Slot(x, y, *before) for before in ((1, 1), (0, 1), (1, 0), (0, 0))]
    return Layout((2 * size[0], 2 * size[1]), size, slots)

"""Images turned, zoomed, slanted and shifted as one matrix says, and their boxes with them.

    original pixels --(where the image lies)--> canvas --(the view)--> input

All matrices are 3x3 on columns (x, y, 1) and count edges: the first pixel is 0..1, as in boxes.
They are multiplied before any pixel is touched, so an image is resampled once, straight into its
part of the input, and a canvas is never painted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np

from ppdist.data.augment import AffineConfig

_LEAST_SIDE = 2.0  # input pixels; less is no object to learn, nor what one of these bounds says
_LEAST_SEEN = 0.1  # of a box's area
_MOST_ASPECT = 100.0
_SUBPIXELS = 4  # bits


class View(NamedTuple):
    """What of a canvas the input shows: its pixels -> the input's; gain: how much larger."""

    matrix_33: np.ndarray
    gain: float


def random_view(
    canvas: tuple[int, int],
    size: tuple[int, int],
    config: AffineConfig,
    mirrored: tuple[bool, bool],
    rng: np.random.Generator,
) -> View:
    """The middle of a `canvas` (height, width), moved at random, in the middle of the input `size`.

    Args:
        mirrored: the input at last, (left to right, top to bottom).
    """
    angle = np.deg2rad(rng.uniform(-config.rotate, config.rotate))
    gain = rng.uniform(1 - config.scale, 1 + config.scale)
    slant_x, slant_y = np.tan(np.deg2rad(rng.uniform(-config.shear, config.shear, 2)))
    shift = rng.uniform(-config.translate, config.translate, 2) * [size[1], size[0]]
    turn_33 = np.eye(3)
    turn_33[:2, :2] = [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]
    turn_33[:2, :2] *= gain
    slant_33 = np.array([[1, slant_x, 0], [slant_y, 1, 0], [0, 0, 1]])
    mirror = np.where(mirrored, -1.0, 1.0)
    middle, target = np.array([canvas[1], canvas[0]]) / 2, np.array([size[1], size[0]]) / 2
    matrix_33 = (
        moved(scale=mirror, to=target)
        @ moved(to=shift)
        @ slant_33
        @ turn_33
        @ moved(to=-middle)
    )  # fmt: skip
    return View(matrix_33, float(gain))


def moved(
    *, scale: Sequence[float] | np.ndarray = (1, 1), to: Sequence[float] | np.ndarray = (0, 0)
) -> np.ndarray:
    """The matrix that scales by (x, y), then moves the origin to (x, y)."""
    return np.array([[scale[0], 0, to[0]], [0, scale[1], to[1]], [0, 0, 1]], np.float64)


def between(source: Sequence[float], target: Sequence[float]) -> np.ndarray:
    """The matrix that takes one upright box (x1, y1, x2, y2) to another."""
    low, high = np.array(source[:2], np.float64), np.array(source[2:], np.float64)
    start = np.array(target[:2], np.float64)
    scale = (np.array(target[2:]) - start) / (high - low)
    return moved(scale=scale, to=start - scale * low)


def paste(
    input_HW3: np.ndarray,
    image_HW3: np.ndarray,
    source: Sequence[float],
    matrix_33: np.ndarray,
) -> None:
    """Draws part of an image into the input, linear, in place; the rest of the input stays.

    Args:
        source: the part (x1, y1, x2, y2), pixels of the image.
        matrix_33: pixels of the image -> pixels of the input.
    """
    left, top, right, bottom = covered(source, matrix_33, input_HW3.shape[:2])
    if left >= right or top >= bottom:
        return
    target_HW3 = input_HW3[top:bottom, left:right]
    # OpenCV counts the middles of pixels, half a pixel from their edges.
    to_middles_33 = moved(to=(-left - 0.5, -top - 0.5)) @ matrix_33 @ moved(to=(0.5, 0.5))
    part_HW3 = cv2.warpAffine(
        image_HW3,
        to_middles_33[:2],
        (right - left, bottom - top),
        flags=cv2.INTER_LINEAR,
        borderMode=cv2.BORDER_REPLICATE,
    )
    if _keeps_upright(matrix_33):
        target_HW3[:] = part_HW3
        return
    inside_HW = np.zeros(part_HW3.shape[:2], np.uint8)
    outline_42 = (_corners(source, matrix_33) - [left + 0.5, top + 0.5]) * 2**_SUBPIXELS
    cv2.fillConvexPoly(inside_HW, np.rint(outline_42).astype(np.int32), 1, shift=_SUBPIXELS)
    np.copyto(target_HW3, part_HW3, where=inside_HW[..., None].astype(bool))


def covered(
    source: Sequence[float], matrix_33: np.ndarray, size: tuple[int, ...]
) -> tuple[int, int, int, int]:
    """The pixels left, top, right, bottom of the input `size` (height, width) around a part.

    Args: as of `paste`.
    Returns: left >= right or top >= bottom where nothing of it is seen.
    """
    corners_42 = _corners(source, matrix_33)
    low, high = corners_42.min(0), corners_42.max(0)
    if _keeps_upright(matrix_33):
        low, high = np.rint(low), np.rint(high)  # parts that touch neither overlap nor leave a gap
    else:
        low, high = np.floor(low), np.ceil(high)
    limit = np.array([size[1], size[0]])
    left, top, right, bottom = np.concatenate([low, high]).clip(0, np.tile(limit, 2)).tolist()
    return int(left), int(top), int(right), int(bottom)


def _corners(source: Sequence[float], matrix_33: np.ndarray) -> np.ndarray:
    x1, y1, x2, y2 = source
    return _apply(matrix_33, np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]], np.float64))


def _keeps_upright(matrix_33: np.ndarray) -> bool:
    return matrix_33[0, 1] == 0 and matrix_33[1, 0] == 0


def map_by_matrix(
    boxes_M4: np.ndarray, matrix_33: np.ndarray, size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Boxes around the mapped corners, cut to the input `size` (height, width), and keep_M.

    keep_M: which are still objects: both sides above 2 pixels, more than a tenth of the area seen,
    and no side 100 times the other, as YOLOv5 decides.
    """
    corners_M42 = boxes_M4[:, [[0, 1], [2, 1], [2, 3], [0, 3]]].astype(np.float64)
    mapped_M42 = _apply(matrix_33, corners_M42)
    low_M2, high_M2 = mapped_M42.min(1), mapped_M42.max(1)
    limit = np.array([size[1], size[0]])
    cut_M4 = np.concatenate([low_M2.clip(0, limit), high_M2.clip(0, limit)], 1)
    sides_M2 = cut_M4[:, 2:] - cut_M4[:, :2]
    large_M = (sides_M2 > _LEAST_SIDE).all(1)
    seen_M = sides_M2.prod(1) > _LEAST_SEEN * (high_M2 - low_M2).prod(1)
    compact_M = sides_M2.max(1) < _MOST_ASPECT * sides_M2.min(1)
    return cut_M4.astype(np.float32), large_M & seen_M & compact_M


def _apply(matrix_33: np.ndarray, points_2: np.ndarray) -> np.ndarray:
    return points_2 @ matrix_33[:2, :2].T + matrix_33[:2, 2]

"""Images turned, zoomed, slanted, shifted and tilted as one matrix says, and their boxes with them.

    original pixels --(where the image lies)--> canvas --(the view)--> input

All matrices are 3x3 on columns (x, y, 1) and count edges: the first pixel is 0..1, as in boxes.
They are multiplied before any pixel is touched, so an image is resampled once, straight into its
part of the input, and a canvas is never painted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np

from ppdist.config.augment import AffineConfig

_LEAST_SIDE = 2.0  # input pixels; less is no object to learn, nor what one of these bounds says
_LEAST_SEEN = 0.1  # of a box's area
_MOST_ASPECT = 100.0
_MOST_ROUNDED = 2.0  # zoom of `paste` up to which half a pixel of the image is one of the input
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
    middle, target = np.array([canvas[1], canvas[0]]) / 2, np.array([size[1], size[0]]) / 2
    turn_33 = np.eye(3)
    turn_33[:2, :2] = [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]
    turn_33[:2, :2] *= gain
    slant_33 = np.array([[1, slant_x, 0], [slant_y, 1, 0], [0, 0, 1]])
    mirror = np.where(mirrored, -1.0, 1.0)
    matrix_33 = (
        moved(scale=mirror, to=target)
        @ moved(to=shift)
        @ slant_33
        @ turn_33
        @ moved(to=-middle)
    )  # fmt: skip
    if config.perspective:
        tilt_33 = np.eye(3)  # of points of the canvas about its middle, in halves of the input
        tilt_33[2, :2] = rng.uniform(-config.perspective, config.perspective, 2) / target
        matrix_33 = matrix_33 @ moved(to=middle) @ tilt_33 @ moved(to=-middle)
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
) -> np.ndarray:
    """Draws part of an image into the input, linear, in place; the rest of the input stays.

    Args:
        source: the part (x1, y1, x2, y2), pixels of the image.
        matrix_33: pixels of the image -> pixels of the input.
    Returns: the same, as it was drawn: enlarged twice at most and upright, whole pixels are resized
        to whole pixels, which takes a third of the time of a warp.  Where two pixels of the image
        are seen at least, that moves nothing by more than a pixel and a half.
    """
    left, top, right, bottom = covered(source, matrix_33, input_HW3.shape[:2])
    if left >= right or top >= bottom:
        return matrix_33
    target_HW3 = input_HW3[top:bottom, left:right]
    upright = _keeps_upright(matrix_33)
    if upright and np.abs(matrix_33.diagonal()[:2]).max() <= _MOST_ROUNDED:
        return _resize(image_HW3, matrix_33, target_HW3, left, top)
    # OpenCV counts the middles of pixels, half a pixel from their edges.
    to_middles_33 = moved(to=(-left - 0.5, -top - 0.5)) @ matrix_33 @ moved(to=(0.5, 0.5))
    if upright:  # the middles of these very pixels lie inside
        _warp(image_HW3, to_middles_33, target_HW3)
        return matrix_33
    part_HW3 = np.empty_like(target_HW3)
    _warp(image_HW3, to_middles_33, part_HW3)
    inside_HW = np.zeros(part_HW3.shape[:2], np.uint8)
    outline_42 = (corners(source, matrix_33) - [left + 0.5, top + 0.5]) * 2**_SUBPIXELS
    cv2.fillConvexPoly(inside_HW, np.rint(outline_42).astype(np.int32), 1, shift=_SUBPIXELS)
    cv2.copyTo(part_HW3, inside_HW, target_HW3)
    return matrix_33


def _resize(
    image_HW3: np.ndarray, matrix_33: np.ndarray, out_HW3: np.ndarray, left: int, top: int
) -> np.ndarray:
    """Fills all of `out_HW3`, which begins at (left, top) of the input; returns as `paste` does."""
    scale, shift = matrix_33.diagonal()[:2], matrix_33[:2, 2]
    limit = np.array([image_HW3.shape[1], image_HW3.shape[0]])
    size = out_HW3.shape[1], out_HW3.shape[0]
    right, bottom = left + size[0], top + size[1]
    ends_22 = (np.array([[left, top], [right, bottom]]) - shift) / scale
    low = np.rint(ends_22.min(0)).clip(0, limit - 1)
    high = np.rint(ends_22.max(0)).clip(low + 1, limit)
    (x1, y1), (x2, y2) = low.astype(int).tolist(), high.astype(int).tolist()
    mirror_x, mirror_y = (scale < 0).tolist()
    if mirror_x or mirror_y:
        part_HW3 = cv2.resize(image_HW3[y1:y2, x1:x2], size, interpolation=cv2.INTER_LINEAR)
        cv2.flip(part_HW3, -1 if mirror_x and mirror_y else int(mirror_x), dst=out_HW3)
    else:
        cv2.resize(image_HW3[y1:y2, x1:x2], size, dst=out_HW3, interpolation=cv2.INTER_LINEAR)
    target_x = (right, left) if mirror_x else (left, right)
    target_y = (bottom, top) if mirror_y else (top, bottom)
    return between((x1, y1, x2, y2), (target_x[0], target_y[0], target_x[1], target_y[1]))


def _warp(image_HW3: np.ndarray, matrix_33: np.ndarray, out_HW3: np.ndarray) -> None:
    """Fills all of `out_HW3`; what lies beside the image goes on as its edge."""
    size = out_HW3.shape[1], out_HW3.shape[0]
    if _is_affine(matrix_33):
        cv2.warpAffine(
            image_HW3,
            matrix_33[:2],
            size,
            dst=out_HW3,
            flags=cv2.INTER_LINEAR,
            borderMode=cv2.BORDER_REPLICATE,
        )
    else:
        cv2.warpPerspective(
            image_HW3,
            matrix_33,
            size,
            dst=out_HW3,
            flags=cv2.INTER_LINEAR,
            borderMode=cv2.BORDER_REPLICATE,
        )


def covered(
    source: Sequence[float], matrix_33: np.ndarray, size: tuple[int, ...]
) -> tuple[int, int, int, int]:
    """The pixels left, top, right, bottom of the input `size` (height, width) around a part.

    Args: as of `paste`.
    Returns: left >= right or top >= bottom where nothing of it is seen.
    """
    corners_42 = corners(source, matrix_33)
    low, high = corners_42.min(0), corners_42.max(0)
    if _keeps_upright(matrix_33):
        low, high = np.rint(low), np.rint(high)  # parts that touch neither overlap nor leave a gap
    else:
        low, high = np.floor(low), np.ceil(high)
    limits = size[1], size[0], size[1], size[0]
    left, top, right, bottom = (
        min(max(int(value), 0), limit)
        for value, limit in zip((*low.tolist(), *high.tolist()), limits)
    )
    return left, top, right, bottom


def corners(source: Sequence[float], matrix_33: np.ndarray) -> np.ndarray:
    """Where the corners of a box (x1, y1, x2, y2) are mapped, float64 [4, 2], x y, in turn."""
    x1, y1, x2, y2 = source
    return map_points(np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]], np.float64), matrix_33)


def _keeps_upright(matrix_33: np.ndarray) -> bool:
    return matrix_33[0, 1] == 0 and matrix_33[1, 0] == 0 and _is_affine(matrix_33)


def _is_affine(matrix_33: np.ndarray) -> bool:
    return matrix_33[2, 0] == 0 and matrix_33[2, 1] == 0


def map_by_matrix(
    boxes_M4: np.ndarray, matrix_33: np.ndarray, size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Boxes around what the input `size` (height, width) shows of the mapped ones, and keep_M.

    A turned box becomes a quadrilateral; where that reaches beyond the input, it is cut first.

    keep_M: which are still objects: both sides above 2 pixels, more than a tenth of the area seen,
    and no side 100 times the other, as YOLOv5 decides.
    """
    corners_M42 = boxes_M4[:, [[0, 1], [2, 1], [2, 3], [0, 3]]].astype(np.float64)
    mapped_M42 = map_points(corners_M42, matrix_33)
    low_M2, high_M2 = mapped_M42.min(1), mapped_M42.max(1)
    limit = np.array([size[1], size[0]])
    cut_M4 = np.concatenate([low_M2.clip(0, limit), high_M2.clip(0, limit)], 1)
    sides_M2 = cut_M4[:, 2:] - cut_M4[:, :2]
    seen_M = sides_M2.prod(1) > _LEAST_SEEN * (high_M2 - low_M2).prod(1)
    if not _keeps_upright(matrix_33):
        beyond_M = ((low_M2 < 0) | (high_M2 > limit)).any(1)
        for number in np.flatnonzero(beyond_M & (sides_M2 > _LEAST_SIDE).all(1)).tolist():
            whole = mapped_M42[number].tolist()
            seen = _cut_polygon(whole, size)
            seen_M[number] = _area(seen) > _LEAST_SEEN * _area(whole)
            if seen:
                x, y = zip(*seen)
                cut_M4[number] = min(x), min(y), max(x), max(y)
        sides_M2 = cut_M4[:, 2:] - cut_M4[:, :2]
    large_M = (sides_M2 > _LEAST_SIDE).all(1)
    compact_M = sides_M2.max(1) < _MOST_ASPECT * sides_M2.min(1)
    return cut_M4.astype(np.float32), large_M & seen_M & compact_M


def _cut_polygon(points: list[list[float]], size: tuple[int, int]) -> list[list[float]]:
    """What the input `size` (height, width) shows of a convex polygon: its corners [x, y], in turn.

    Plain numbers: a few corners at a time, of the few boxes at the border of the input.
    Source: Sutherland and Hodgman 1974, "Reentrant polygon clipping", CACM 17(1).
    """
    for axis, limit in ((0, size[1]), (1, size[0])):
        for bound, inwards in ((0.0, 1.0), (float(limit), -1.0)):
            depths = [(point[axis] - bound) * inwards for point in points]
            if not points or min(depths) >= 0:
                continue
            kept = []
            for at in range(len(points)):  # the edge from the corner before to this one
                depth, before = depths[at], depths[at - 1]
                if (depth < 0) != (before < 0):
                    share = before / (before - depth)
                    (x0, y0), (x1, y1) = points[at - 1], points[at]
                    crossing = [x0 + share * (x1 - x0), y0 + share * (y1 - y0)]
                    crossing[axis] = bound
                    kept.append(crossing)
                if depth >= 0:
                    kept.append(points[at])
            points = kept
    return points


def _area(points: list[list[float]]) -> float:
    """Of a polygon, in square pixels."""
    turned = zip(points, points[-1:] + points[:-1])
    return abs(sum(x0 * y1 - x1 * y0 for (x1, y1), (x0, y0) in turned)) / 2


def map_points(points_2: np.ndarray, matrix_33: np.ndarray) -> np.ndarray:
    """Points (x, y), any shape that ends in 2, as a matrix maps them; none lies behind the view."""
    mapped_2 = points_2 @ matrix_33[:2, :2].T + matrix_33[:2, 2]
    if _is_affine(matrix_33):
        return mapped_2
    return mapped_2 / (points_2 @ matrix_33[2, :2] + matrix_33[2, 2])[..., None]

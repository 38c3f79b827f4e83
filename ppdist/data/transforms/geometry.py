"""Geometry of a sample: resize, expand, crop, mirror, affine; boxes follow.

    GEOMETRY_STEPS change GeometryParams: a window of the image, mirrors, a matrix
    no matrix: window -> ResizeParams -> one resize of one part -> colours -> mirror
    a matrix, or a mosaic: image -> its place on a canvas -> the matrix -> input, in one warp

The view of an image is decided from its boxes before any pixel is touched, and matrices are
multiplied first, so an image is resampled once, straight into its part of the input.  Matrices
are 3x3 on columns (x, y, 1) and count edges: the first pixel is 0..1, as in boxes.  Randomness
comes from the generator handed in, keyed by (seed, epoch, index): a sample looks the same whichever
rank or worker makes it.

Sources: the augmentation of SSD (Liu et al. 2016, arXiv:1512.02325, section 2.2 and its code) in
the order PP-YOLOE uses it (arXiv:2203.16250): distort, expand, crop, flip, resize.  Letterbox is
that of YOLOv5.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np

from ppdist.config import preprocess
from ppdist.config.augment import AugmentConfig
from ppdist.config.data import Resize
from ppdist.data.boxes import box_iou
from ppdist.data.types import ImageRecord, Sample
from ppdist.runtime.predictor import antialiased

FILL = (124, 116, 104)  # mean colour of ImageNet, RGB; fills the input beside an expanded image
GREY = preprocess.GREY  # fills it beside a letterboxed image, and between the images of a mosaic


# --- quarter turns -------------------------------------------------------------------------------

_TURNS = {1: cv2.ROTATE_90_CLOCKWISE, 2: cv2.ROTATE_180, 3: cv2.ROTATE_90_COUNTERCLOCKWISE}


@dataclass(frozen=True, slots=True)
class SourceImage:
    """An image and its objects, without crowds, in its pixels.

    index: in DetectionSet.records.  image_HW3: uint8 RGB, each pixel `reduced` ones of the original
    a side; width, height, boxes_M4 (xyxy, float32) and outlines_M (x y, as ImageRecord.polygons_M)
    are those of the original.
    """

    index: int
    image_HW3: np.ndarray
    reduced: int
    width: int
    height: int
    boxes_M4: np.ndarray
    labels_M: np.ndarray
    outlines_M: tuple[tuple[np.ndarray, ...], ...] = ()

    @classmethod
    def of(
        cls, index: int, image_HW3: np.ndarray, reduced: int, record: ImageRecord, turn: int
    ) -> "SourceImage":
        """Builds the source image of a record, turned by `turn`.

        Args: image_HW3: of `record`, reduced, not yet turned; turn: see `random_turn`.
        """
        width, height = sides_after_turn(record, turn)
        alone_M = ~record.crowd_M
        boxes_M4, outlines_M = record.boxes_M4[alone_M], record.polygons_M
        if outlines_M:
            outlines_M = tuple(outlines_M[number] for number in np.flatnonzero(alone_M))
        if turn:
            turn_33 = _turn_matrix(turn, record)
            image_HW3 = turn_image(image_HW3, turn)
            ends_M22 = map_points(boxes_M4.reshape(-1, 2, 2).astype(np.float64), turn_33)
            boxes_M4 = np.concatenate([ends_M22.min(1), ends_M22.max(1)], 1).astype(np.float32)
            outlines_M = tuple(
                tuple(map_points(outline_K2, turn_33) for outline_K2 in outlines)
                for outlines in outlines_M
            )
        labels_M = record.labels_M[alone_M]
        return cls(index, image_HW3, reduced, width, height, boxes_M4, labels_M, outlines_M)


def _turn_matrix(turn: int, record: ImageRecord) -> np.ndarray:
    """Returns the matrix of a turn: pixels of the image -> pixels of the turned one.

    Edges are counted, not middles of pixels.
    """
    width, height = record.width, record.height
    rows = {
        1: [[0, -1, height], [1, 0, 0]],
        2: [[-1, 0, width], [0, -1, height]],
        3: [[0, 1, 0], [-1, 0, width]],
    }[turn]
    return np.array([*rows, [0, 0, 1]], np.float64)


def random_turn(chance: float, rng: np.random.Generator) -> int:
    """Draws the quarter turns clockwise, 0 to 3; draws nothing if `chance` is 0."""
    return int(rng.integers(1, 4)) if chance and rng.random() < chance else 0


def sides_after_turn(record: ImageRecord, turn: int) -> tuple[int, int]:
    """Returns (width, height) of an image after a number of quarter turns."""
    return (record.height, record.width) if turn % 2 else (record.width, record.height)


def turn_image(image_HW3: np.ndarray, turn: int) -> np.ndarray:
    """Turns an image by a number of quarter turns clockwise."""
    return cv2.rotate(image_HW3, _TURNS[turn]) if turn else image_HW3


# --- resize, expand, crop, mirror ----------------------------------------------------------------

_INTERPOLATIONS = (
    cv2.INTER_NEAREST,
    cv2.INTER_LINEAR,
    cv2.INTER_CUBIC,
    cv2.INTER_AREA,
    cv2.INTER_LANCZOS4,
)
_SMALLEST_SIDE = 1.0  # input pixels: a smaller rest of a box is dropped


class ResizeParams(NamedTuple):
    """A part of the original and the part of the input that it fills.

    Both parts are in whole pixels x1 y1 x2 y2.  The rest of the input is `fill` (RGB).
    mirror_x, mirror_y: the input is mirrored last.
    """

    source: tuple[int, int, int, int]
    target: tuple[int, int, int, int]
    height: int
    width: int
    mirror_x: bool = False
    mirror_y: bool = False
    fill: tuple[int, int, int] = FILL

    @property
    def scale(self) -> tuple[float, float]:
        """Returns (y, x): input pixels per pixel of the original."""
        x1, y1, x2, y2 = self.source
        left, top, right, bottom = self.target
        return (bottom - top) / (y2 - y1), (right - left) / (x2 - x1)

    @property
    def matrix_33(self) -> np.ndarray:
        """Returns the matrix: pixels of the original -> pixels of the input, mirrors included."""
        scale = -1 if self.mirror_x else 1, -1 if self.mirror_y else 1
        start = self.width * self.mirror_x, self.height * self.mirror_y
        return scale_shift_matrix(scale=scale, to=start) @ box_matrix(self.source, self.target)


def stretch_image(width: int, height: int, size: tuple[int, int]) -> ResizeParams:
    """Stretches the whole image to the input, as PP-YOLOE evaluates.

    Args: size: (height, width) of the input.
    """
    return ResizeParams((0, 0, width, height), (0, 0, size[1], size[0]), *size)


def letterbox(
    width: int, height: int, size: tuple[int, int], within: tuple[int, int] | None = None
) -> ResizeParams:
    """Centres the whole image in the input, keeping its shape.

    scale = min(input height / height, input width / width)
    side  = floor(side of the image * scale + 1/2), 1 at least
    start = (side of the input - side) // 2

    Args:
        size: (height, width) of the input.
        within: (height, width) that determines the scale if the input has additional grey padding;
            None: `size`.
    """
    within = within or size
    scale = min(within[0] / height, within[1] / width)
    tall = max(1, min(size[0], math.floor(height * scale + 0.5)))
    wide = max(1, min(size[1], math.floor(width * scale + 0.5)))
    top, left = (size[0] - tall) // 2, (size[1] - wide) // 2
    target = (left, top, left + wide, top + tall)
    return ResizeParams((0, 0, width, height), target, *size, fill=GREY)


def fit_image(
    width: int,
    height: int,
    size: tuple[int, int],
    resize: Resize,
    within: tuple[int, int] | None = None,
) -> ResizeParams:
    """Places the whole image in the input, as evaluation sees it.

    Args:
        size: (height, width) of the input.
        within: of a letterbox; see there.
    """
    if resize == "letterbox":
        return letterbox(width, height, size, within)
    return stretch_image(width, height, size)


def resize_for_evaluation(
    image_HW3: np.ndarray,
    size: tuple[int, int],
    resize: Resize = "stretch",
    within: tuple[int, int] | None = None,
) -> np.ndarray:
    """Resizes the whole image to the input of evaluation and inference.

    Stretched cubic, as PP-YOLOE does, stretched as Pillow does, or letterboxed linear, as YOLOv5.

    Args:
        size: (height, width) of the input.
        within: of a letterbox; see there.
    """
    height, width = image_HW3.shape[:2]
    if resize == "stretch_antialiased":
        return antialiased(image_HW3, (size[1], size[0]))
    interpolation = cv2.INTER_LINEAR if resize == "letterbox" else cv2.INTER_CUBIC
    return render(image_HW3, fit_image(width, height, size, resize, within), interpolation)


def pad_to_aspect(window: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Returns the smallest window (x1, y1, x2, y2) around a window with the aspect of the input."""
    sides = window[2:] - window[:2]
    shape = np.array([size[1], size[0]], np.float64)
    room = shape * (sides / shape).max() - sides
    return np.concatenate([window[:2] - room / 2, window[2:] + room / 2])


def place_window(
    window: np.ndarray, width: int, height: int, size: tuple[int, int], reduced: int = 1
) -> ResizeParams:
    """Rounds a window to whole pixels of image and input.

    The window (x1, y1, x2, y2) is in original pixels and may reach beyond the image.  Boxes mapped
    by the result lie exactly where `render` puts their pixels.

    Args:
        reduced: of the image to be rendered: the window is rounded to its pixels.
    """
    limit = np.array([width, height])
    # Outwards, so that the window loses no pixel of the image.
    low, high = np.floor(window[:2] / reduced), np.ceil(window[2:] / reduced)
    low, high = (low * reduced).clip(0, limit - 1), (high * reduced).clip(1, limit)
    # At least one pixel, even if the window lies outside the image.
    high = np.maximum(high, low + 1)
    scale = np.array([size[1], size[0]]) / (window[2:] - window[:2])
    target_low = np.rint((low - window[:2]) * scale).clip(0, [size[1] - 1, size[0] - 1])
    target_high = np.rint((high - window[:2]) * scale).clip(target_low + 1, [size[1], size[0]])
    x1, y1, x2, y2 = (int(value) for value in (*low, *high))
    left, top, right, bottom = (int(value) for value in (*target_low, *target_high))
    return ResizeParams((x1, y1, x2, y2), (left, top, right, bottom), *size)


def map_boxes(boxes_M4: np.ndarray, placement: ResizeParams) -> tuple[np.ndarray, np.ndarray]:
    """Maps boxes to input pixels and clips them to the part that the image fills.

    Returns: boxes [M, 4]; keep_M, True for those that are still objects: the centre is visible and
        both sides are at least one pixel long.
    """
    source, target = np.array(placement.source, np.float64), np.array(placement.target, np.float64)
    scale = (target[2:] - target[:2]) / (source[2:] - source[:2])
    mapped_M22 = (boxes_M4.reshape(-1, 2, 2) - source[:2]) * scale + target[:2]
    centre_M2 = mapped_M22.mean(1)
    cut_M22 = mapped_M22.clip(target[:2], target[2:])
    seen_M = ((centre_M2 > target[:2]) & (centre_M2 < target[2:])).all(1)
    keep_M = seen_M & (cut_M22[:, 1] - cut_M22[:, 0] >= _SMALLEST_SIDE).all(1)
    if placement.mirror_x:
        # Mirroring exchanges the first and the last corner.
        cut_M22[:, :, 0] = placement.width - cut_M22[:, ::-1, 0]
    if placement.mirror_y:
        cut_M22[:, :, 1] = placement.height - cut_M22[:, ::-1, 1]
    return cut_M22.reshape(-1, 4).astype(np.float32), keep_M


def render(
    image_HW3: np.ndarray,
    placement: ResizeParams,
    interpolation: int,
    colours_34: np.ndarray | None = None,
    reduced: int = 1,
) -> np.ndarray:
    """Renders the input, uint8 RGB [placement.height, placement.width, 3].

    Args:
        image_HW3: the image, or with `reduced` a reduction of it (see `read_image`).
        interpolation: OpenCV's constant.
        colours_34: from `random_colours`; applied to the image, not to the fill beside it.
    """
    x1, y1, x2, y2 = placement.source
    left, top, right, bottom = placement.target
    part = image_HW3[y1 // reduced : -(-y2 // reduced), x1 // reduced : -(-x2 // reduced)]
    if part.shape[:2] != (bottom - top, right - left):
        part = cv2.resize(part, (right - left, bottom - top), interpolation=interpolation)
    if colours_34 is not None:
        part = cv2.transform(part, colours_34)
    if part.shape[:2] != (placement.height, placement.width):
        below, beside = placement.height - bottom, placement.width - right
        part = cv2.copyMakeBorder(
            part, top, below, left, beside, cv2.BORDER_CONSTANT, value=placement.fill
        )
    if placement.mirror_x or placement.mirror_y:
        part = cv2.flip(part, _flip_code(placement.mirror_x, placement.mirror_y))
    return part


def _flip_code(mirror_x: bool, mirror_y: bool) -> int:
    """Returns the flip code of OpenCV: 1 left to right, 0 top to bottom, -1 both."""
    return -1 if mirror_x and mirror_y else int(mirror_x)


def random_interpolation(on: bool, rng: np.random.Generator) -> int:
    """Draws one of OpenCV's interpolations; if disabled, draws nothing and returns linear."""
    return _INTERPOLATIONS[rng.integers(len(_INTERPOLATIONS))] if on else cv2.INTER_LINEAR


# --- steps: what the input shows -----------------------------------------------------------------

_CROP_OVERLAPS = (None, 0.0, 0.1, 0.3, 0.5, 0.7, 0.9)  # None: no crop
_CROP_TRIES = 50


class GeometryParams(NamedTuple):
    """The view of an image or a mosaic that the input shows.

    width, height: of the image, or of the mosaic's canvas, in pixels.
    size: (height, width) of the input.
    boxes_M4: of the image's objects, xyxy in its pixels; none of a mosaic's.
    window: the part of the image that fills the input, x1 y1 x2 y2; it may reach beyond the image.
        None: a mosaic, whose images have their own positions.
    matrix_33: applied to the view, in input pixels from its middle; None: none.
    mirror_x, mirror_y: the input is mirrored last.
    """

    width: int
    height: int
    size: tuple[int, int]
    boxes_M4: np.ndarray = np.zeros((0, 4), np.float32)
    window: np.ndarray | None = None
    matrix_33: np.ndarray | None = None
    mirror_x: bool = False
    mirror_y: bool = False

    @classmethod
    def of_image(
        cls, boxes_M4: np.ndarray, width: int, height: int, size: tuple[int, int]
    ) -> "GeometryParams":
        """Creates the view of a whole image."""
        return cls(width, height, size, boxes_M4, np.array([0.0, 0.0, width, height]))

    def moved_by(self, matrix_33: np.ndarray) -> "GeometryParams":
        """Returns the view with one more matrix, in input pixels from its middle."""
        if self.matrix_33 is not None:
            matrix_33 = matrix_33 @ self.matrix_33
        return self._replace(matrix_33=matrix_33)

    @property
    def view_33(self) -> np.ndarray:
        """Returns the matrix: pixels of the canvas or the placed window -> pixels of the input."""
        target = np.array(self.size[::-1]) / 2
        middle = np.array([self.width, self.height]) / 2 if self.window is None else target
        mirror = np.where([self.mirror_x, self.mirror_y], -1.0, 1.0)
        moved_33 = np.eye(3) if self.matrix_33 is None else self.matrix_33
        return (
            scale_shift_matrix(scale=mirror, to=target) @ moved_33 @ scale_shift_matrix(to=-middle)
        )

    def placement(self, resize: Resize, reduced: int = 1) -> ResizeParams:
        """Places the window of an image in the input, not mirrored.

        Args: reduced: the source part begins and ends at multiples of this many pixels.
        """
        assert self.window is not None, "a mosaic has none"
        if resize != "letterbox":
            return place_window(self.window, self.width, self.height, self.size, reduced)
        if np.array_equal(self.window, [0, 0, self.width, self.height]):
            return letterbox(self.width, self.height, self.size)  # the very pixels of evaluation
        window = pad_to_aspect(self.window, self.size)
        return place_window(window, self.width, self.height, self.size, reduced)._replace(fill=GREY)


def expand(
    params: GeometryParams, augment: AugmentConfig, rng: np.random.Generator
) -> GeometryParams:
    """Enlarges the window by a random factor up to expand_most, at a random position."""
    if params.window is None or rng.random() >= augment.expand:
        return params
    sides = params.window[2:] - params.window[:2]
    room = sides * (rng.uniform(1.0, augment.expand_most) - 1.0)
    corner = params.window[:2] - rng.random(2) * room
    return params._replace(window=np.concatenate([corner, corner + sides + room]))


def crop(
    params: GeometryParams, augment: AugmentConfig, rng: np.random.Generator
) -> GeometryParams:
    """Narrows the window to a random part whose IoU with some box reaches a threshold.

    Tries the thresholds in random order, each with 50 random parts of aspect 0.5 to 2; a part must
    contain the centre of at least one box.  Does not crop if the threshold None comes first or all
    others fail.
    """
    window, boxes_M4 = params.window, params.boxes_M4
    if window is None or rng.random() >= augment.crop or not len(boxes_M4):
        return params
    sides = window[2:] - window[:2]
    centres_M2 = (boxes_M4[:, :2] + boxes_M4[:, 2:]) / 2
    for choice in rng.permutation(len(_CROP_OVERLAPS)):
        overlap = _CROP_OVERLAPS[choice]
        if overlap is None:
            break
        scale_T = rng.uniform(augment.crop_least, 1.0, _CROP_TRIES)
        # Only aspects with which both sides fit into the window.
        aspect_T = rng.uniform(np.maximum(0.5, scale_T**2), np.minimum(2.0, scale_T**-2))
        part_T2 = np.stack([scale_T * np.sqrt(aspect_T), scale_T / np.sqrt(aspect_T)], 1) * sides
        corner_T2 = window[:2] + rng.random((_CROP_TRIES, 2)) * (sides - part_T2)
        parts_T4 = np.concatenate([corner_T2, corner_T2 + part_T2], 1)
        inside_TM = (
            (centres_M2 > parts_T4[:, None, :2]) & (centres_M2 < parts_T4[:, None, 2:])
        ).all(2)
        good_T = inside_TM.any(1) & (box_iou(parts_T4, boxes_M4).max(1) >= overlap)
        if good_T.any():
            return params._replace(window=parts_T4[good_T.argmax()])
    return params


def flip(
    params: GeometryParams, augment: AugmentConfig, rng: np.random.Generator
) -> GeometryParams:
    return params._replace(mirror_x=rng.random() < augment.flip)


def flip_vertical(
    params: GeometryParams, augment: AugmentConfig, rng: np.random.Generator
) -> GeometryParams:
    return params._replace(mirror_y=rng.random() < augment.flip_vertical)


def affine(
    params: GeometryParams, augment: AugmentConfig, rng: np.random.Generator
) -> GeometryParams:
    """Adds a random rotation, zoom, shear, shift and perspective about the middle."""
    config = augment.affine
    if not config.moves and params.window is not None:
        return params  # a mosaic always draws these numbers, so that seeds keep their samples
    angle = np.deg2rad(rng.uniform(-config.rotate, config.rotate))
    gain = rng.uniform(1 - config.scale, 1 + config.scale)
    slant_x, slant_y = np.tan(np.deg2rad(rng.uniform(-config.shear, config.shear, 2)))
    sides = np.array(params.size[::-1])
    shift = rng.uniform(-config.translate, config.translate, 2) * sides
    turn_33, tilt_33 = np.eye(3), np.eye(3)
    turn_33[:2, :2] = [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]
    turn_33[:2, :2] *= gain
    slant_33 = np.array([[1, slant_x, 0], [slant_y, 1, 0], [0, 0, 1]])
    if config.perspective:
        tilt = rng.uniform(-config.perspective, config.perspective, 2)
        tilt_33[2, :2] = tilt / (sides / 2)  # of points in halves of the input
    return params.moved_by(scale_shift_matrix(to=shift) @ slant_33 @ turn_33 @ tilt_33)


# In order of application.  Each is named like its key of `data.augment`, draws what it needs and
# returns the new parameters; a mosaic has no window, so `expand` and `crop` skip it.
# A new step is a function and a row.  It draws nothing if its key is 0, so that the samples of
# other configurations do not change.
GEOMETRY_STEPS: tuple[
    Callable[[GeometryParams, AugmentConfig, np.random.Generator], GeometryParams], ...
] = (expand, crop, flip, flip_vertical, affine)


def random_geometry(
    params: GeometryParams, augment: AugmentConfig, rng: np.random.Generator
) -> GeometryParams:
    for step in GEOMETRY_STEPS:
        params = step(params, augment, rng)
    return params


# --- drawing through a matrix --------------------------------------------------------------------

# Limits for the visible part of a box; smaller or longer objects are dropped.
_LEAST_SIDE = 2.0  # input pixels
_LEAST_SEEN = 0.1  # of the box's area
_MOST_ASPECT = 100.0
_MOST_ROUNDED = 2.0  # zoom of `paste` up to which half a pixel of the image is one of the input
_SUBPIXELS = 4  # bits


def paste(
    input_HW3: np.ndarray,
    image_HW3: np.ndarray,
    source: Sequence[float],
    matrix_33: np.ndarray,
) -> np.ndarray:
    """Draws part of an image into the input in place, linear.

    Args:
        source: the part (x1, y1, x2, y2), pixels of the image.
        matrix_33: pixels of the image -> pixels of the input.
    Returns: the matrix that was drawn.  An upright part enlarged at most twice is resized from
        whole pixels to whole pixels, which takes a third of the time of a warp and, if at least
        two pixels of the image are visible, moves nothing by more than a pixel and a half.
    """
    left, top, right, bottom = bounding_pixels(source, matrix_33, input_HW3.shape[:2])
    if left >= right or top >= bottom:
        return matrix_33
    target_HW3 = input_HW3[top:bottom, left:right]
    upright = _is_upright(matrix_33)
    if upright and max(abs(matrix_33[0, 0]), abs(matrix_33[1, 1])) <= _MOST_ROUNDED:
        return _resize(image_HW3, matrix_33, target_HW3, left, top)
    # OpenCV counts the middles of pixels, half a pixel from their edges.
    to_middles_33 = (
        scale_shift_matrix(to=(-left - 0.5, -top - 0.5))
        @ matrix_33
        @ scale_shift_matrix(to=(0.5, 0.5))
    )
    if upright:  # the middles of these very pixels lie inside
        _warp(image_HW3, to_middles_33, target_HW3)
        return matrix_33
    part_HW3 = np.empty_like(target_HW3)
    _warp(image_HW3, to_middles_33, part_HW3)
    # The warp fills all of its rectangle; only pixels inside the outline belong to the image.
    inside_HW = np.zeros(part_HW3.shape[:2], np.uint8)
    outline_42 = (map_corners(source, matrix_33) - [left + 0.5, top + 0.5]) * 2**_SUBPIXELS
    cv2.fillConvexPoly(inside_HW, np.rint(outline_42).astype(np.int32), 1, shift=_SUBPIXELS)
    cv2.copyTo(part_HW3, inside_HW, target_HW3)
    return matrix_33


def _resize(
    image_HW3: np.ndarray, matrix_33: np.ndarray, out_HW3: np.ndarray, left: int, top: int
) -> np.ndarray:
    """Resizes into `out_HW3` at (left, top); returns the drawn matrix, as `paste` does."""
    (scale_x, _, shift_x), (_, scale_y, shift_y), _ = matrix_33.tolist()
    size = out_HW3.shape[1], out_HW3.shape[0]
    right, bottom = left + size[0], top + size[1]
    x1, x2 = _order_span(
        (left - shift_x) / scale_x, (right - shift_x) / scale_x, image_HW3.shape[1]
    )
    y1, y2 = _order_span(
        (top - shift_y) / scale_y, (bottom - shift_y) / scale_y, image_HW3.shape[0]
    )
    mirror_x, mirror_y = scale_x < 0, scale_y < 0
    if mirror_x or mirror_y:
        part_HW3 = cv2.resize(image_HW3[y1:y2, x1:x2], size, interpolation=cv2.INTER_LINEAR)
        cv2.flip(part_HW3, _flip_code(mirror_x, mirror_y), dst=out_HW3)
    else:
        cv2.resize(image_HW3[y1:y2, x1:x2], size, dst=out_HW3, interpolation=cv2.INTER_LINEAR)
    target_x = (right, left) if mirror_x else (left, right)
    target_y = (bottom, top) if mirror_y else (top, bottom)
    return box_matrix((x1, y1, x2, y2), (target_x[0], target_y[0], target_x[1], target_y[1]))


def _order_span(first: float, second: float, limit: int) -> tuple[int, int]:
    """Rounds two coordinates to whole pixels in [0, limit], in order and at least one apart."""
    low = min(max(round(min(first, second)), 0), limit - 1)
    return low, min(max(round(max(first, second)), low + 1), limit)


def _warp(image_HW3: np.ndarray, matrix_33: np.ndarray, out_HW3: np.ndarray) -> None:
    """Warps into all of `out_HW3`; the image's edge continues beside it."""
    affine = _is_affine(matrix_33)
    (cv2.warpAffine if affine else cv2.warpPerspective)(
        image_HW3,
        matrix_33[:2] if affine else matrix_33,
        (out_HW3.shape[1], out_HW3.shape[0]),
        dst=out_HW3,
        flags=cv2.INTER_LINEAR,
        borderMode=cv2.BORDER_REPLICATE,
    )


def bounding_pixels(
    source: Sequence[float], matrix_33: np.ndarray, size: tuple[int, ...]
) -> tuple[int, int, int, int]:
    """Computes left, top, right, bottom of the input pixels around a mapped part.

    Args: as of `paste`; size: (height, width) of the input.
    Returns: the bounds; left >= right or top >= bottom if no part is visible.
    """
    if _is_upright(matrix_33):
        (scale_x, _, shift_x), (_, scale_y, shift_y), _ = matrix_33.tolist()
        x1, y1, x2, y2 = source
        x1, x2 = sorted((x1 * scale_x + shift_x, x2 * scale_x + shift_x))
        y1, y2 = sorted((y1 * scale_y + shift_y, y2 * scale_y + shift_y))
        # Rounded, so that parts that touch neither overlap nor leave a gap.
        edges = round(x1), round(y1), round(x2), round(y2)
    else:
        corners_42 = map_corners(source, matrix_33)
        low, high = np.floor(corners_42.min(0)), np.ceil(corners_42.max(0))
        edges = int(low[0]), int(low[1]), int(high[0]), int(high[1])
    left, top, right, bottom = edges
    height, width = size[:2]
    return (
        _clamp(left, width),
        _clamp(top, height),
        _clamp(right, width),
        _clamp(bottom, height),
    )


def _clamp(place: int, side: int) -> int:
    return min(max(place, 0), side)


def map_by_matrix(
    boxes_M4: np.ndarray, matrix_33: np.ndarray, size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Maps boxes by a matrix, to the boxes around their visible parts.

    A rotated box becomes a quadrilateral; if that reaches beyond the input, it is clipped first.

    Args: size: (height, width) of the input.
    Returns: boxes [M, 4] and keep_M, which are still objects by YOLOv5's rule: both sides above 2
        pixels, more than a tenth of the area visible, and no side 100 times the other.
    """
    upright = _is_upright(matrix_33)
    if upright:
        ends_M22 = boxes_M4.reshape(-1, 2, 2) * matrix_33.diagonal()[:2] + matrix_33[:2, 2]
        low_M2, high_M2 = ends_M22.min(1), ends_M22.max(1)
    else:
        corners_M42 = boxes_M4[:, [[0, 1], [2, 1], [2, 3], [0, 3]]].astype(np.float64)
        mapped_M42 = map_points(corners_M42, matrix_33)
        low_M2, high_M2 = mapped_M42.min(1), mapped_M42.max(1)
    limit = np.array([size[1], size[0]])
    cut_M4 = np.concatenate([low_M2.clip(0, limit), high_M2.clip(0, limit)], 1)
    sides_M2 = cut_M4[:, 2:] - cut_M4[:, :2]
    # Exact for upright boxes; rotated ones that leave the input are measured again below.
    seen_M = sides_M2.prod(1) > _LEAST_SEEN * (high_M2 - low_M2).prod(1)
    if not upright:
        beyond_M = ((low_M2 < 0) | (high_M2 > limit)).any(1)
        for number in np.flatnonzero(beyond_M & (sides_M2 > _LEAST_SIDE).all(1)).tolist():
            mapped = mapped_M42[number].tolist()
            visible = _clip_polygon(mapped, size)
            seen_M[number] = _polygon_area(visible) > _LEAST_SEEN * _polygon_area(mapped)
            if visible:
                x, y = zip(*visible)
                cut_M4[number] = min(x), min(y), max(x), max(y)
        sides_M2 = cut_M4[:, 2:] - cut_M4[:, :2]
    large_M = (sides_M2 > _LEAST_SIDE).all(1)
    compact_M = sides_M2.max(1) < _MOST_ASPECT * sides_M2.min(1)
    return cut_M4.astype(np.float32), large_M & seen_M & compact_M


def _clip_polygon(points: list[list[float]], size: tuple[int, int]) -> list[list[float]]:
    """Clips a convex polygon to the input.

    Corners are [x, y], in order around the polygon.  They are plain numbers because only the few
    boxes at the border of the input are clipped, for which arrays would be slower.

    Args: size: (height, width) of the input.
    Source: Sutherland and Hodgman 1974, "Reentrant polygon clipping", CACM 17(1).
    """
    for axis, limit in ((0, size[1]), (1, size[0])):
        for bound, inwards in ((0.0, 1.0), (float(limit), -1.0)):
            depths = [(point[axis] - bound) * inwards for point in points]
            if not points or min(depths) >= 0:
                continue
            clipped = []
            for number in range(len(points)):  # the edge from the corner before to this one
                depth, before = depths[number], depths[number - 1]
                if (depth < 0) != (before < 0):
                    share = before / (before - depth)
                    (x0, y0), (x1, y1) = points[number - 1], points[number]
                    crossing = [x0 + share * (x1 - x0), y0 + share * (y1 - y0)]
                    crossing[axis] = bound
                    clipped.append(crossing)
                if depth >= 0:
                    clipped.append(points[number])
            points = clipped
    return points


def _polygon_area(points: list[list[float]]) -> float:
    """Computes the area of a polygon, in square pixels."""
    turned = zip(points, points[-1:] + points[:-1])
    return abs(sum(x0 * y1 - x1 * y0 for (x1, y1), (x0, y0) in turned)) / 2


# --- matrices ------------------------------------------------------------------------------------


def scale_shift_matrix(
    *, scale: Sequence[float] | np.ndarray = (1, 1), to: Sequence[float] | np.ndarray = (0, 0)
) -> np.ndarray:
    """Builds the matrix that scales, then shifts the origin; both by (x, y)."""
    return np.array([[scale[0], 0, to[0]], [0, scale[1], to[1]], [0, 0, 1]], np.float64)


def box_matrix(source: Sequence[float], target: Sequence[float]) -> np.ndarray:
    """Builds the matrix from one upright box (x1, y1, x2, y2) to another."""
    x1, y1, x2, y2 = source
    left, top, right, bottom = target
    scale_x, scale_y = (right - left) / (x2 - x1), (bottom - top) / (y2 - y1)
    return scale_shift_matrix(
        scale=(scale_x, scale_y), to=(left - scale_x * x1, top - scale_y * y1)
    )


def map_corners(source: Sequence[float], matrix_33: np.ndarray) -> np.ndarray:
    """Maps the corners of a box, float64 [4, 2], x y, in order around it.

    Args: source: (x1, y1, x2, y2).
    """
    x1, y1, x2, y2 = source
    return map_points(np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]], np.float64), matrix_33)


def map_points(points_2: np.ndarray, matrix_33: np.ndarray) -> np.ndarray:
    """Maps points by a matrix.

    Args: points_2: (x, y), of any shape that ends in 2; none may lie behind the view.
    """
    mapped_2 = points_2 @ matrix_33[:2, :2].T + matrix_33[:2, 2]
    if _is_affine(matrix_33):
        return mapped_2
    return mapped_2 / (points_2 @ matrix_33[2, :2] + matrix_33[2, 2])[..., None]


def _is_upright(matrix_33: np.ndarray) -> bool:
    (_, slant_x, _), (slant_y, _, _), (tilt_x, tilt_y, _) = matrix_33.tolist()
    return slant_x == slant_y == tilt_x == tilt_y == 0


def _is_affine(matrix_33: np.ndarray) -> bool:
    return matrix_33[2, 0] == 0 and matrix_33[2, 1] == 0


# --- canvas --------------------------------------------------------------------------------------


class MosaicCanvas:
    """A canvas of the input's size (height, width), initially grey."""

    def __init__(self, size: tuple[int, int]) -> None:
        # Filling with a scalar is 30 times as fast as filling with a colour.
        self._image_HW3 = np.full((*size, 3), GREY[0], np.uint8)
        self._boxes = [np.zeros((0, 4), np.float32)]
        self._labels = [np.zeros(0, np.int64)]

    def draw(
        self, image_HW3: np.ndarray, source: Sequence[float], matrix_33: np.ndarray, reduced: int
    ) -> np.ndarray:
        """Draws a part of an image as `paste` does, in pixels of the original.

        Args: reduced: pixels of the original per image pixel, along a side.
        Returns: the matrix that was drawn, which holds for its boxes, too.
        """
        if reduced == 1:
            return paste(self._image_HW3, image_HW3, source, matrix_33)
        part = [side / reduced for side in source]
        enlarge_33, reduce_33 = (
            scale_shift_matrix(scale=(by, by)) for by in (reduced, 1 / reduced)
        )
        return paste(self._image_HW3, image_HW3, part, matrix_33 @ enlarge_33) @ reduce_33

    def is_visible(self, width: int, height: int, matrix_33: np.ndarray) -> bool:
        """Returns True if any part of an image of this size would be visible."""
        source = (0, 0, width, height)
        left, top, right, bottom = bounding_pixels(source, matrix_33, self._image_HW3.shape[:2])
        return left < right and top < bottom

    def add_boxes(
        self, boxes_M4: np.ndarray, labels_M: np.ndarray, matrix_33: np.ndarray
    ) -> np.ndarray:
        """Maps the boxes of an image and keeps those that are visible.

        Returns: keep_M: True for the boxes that were kept.
        """
        height, width = self._image_HW3.shape[:2]
        mapped_M4, keep_M = map_by_matrix(boxes_M4, matrix_33, (height, width))
        self._boxes.append(mapped_M4[keep_M])
        self._labels.append(labels_M[keep_M])
        return keep_M

    def sample(self, index: int, colours_34: np.ndarray | None) -> Sample:
        """Returns the finished sample; nothing may be drawn on the canvas afterwards."""
        image_HW3 = self._image_HW3
        if colours_34 is not None:
            image_HW3 = cv2.transform(image_HW3, colours_34)
        return Sample(image_HW3, np.concatenate(self._boxes), np.concatenate(self._labels), index)

"""Where an image goes in the input, settled or at random, and its colours.

    random window (expand, crop) -> Placement -> one resize of one part -> colours -> mirror

Where an image ends up in the input is settled on its boxes, before any pixel is touched, so that
expanding and cropping cost one resize together.  Randomness comes from the generator handed in,
keyed by (seed, epoch, index): a sample looks the same whichever rank or worker makes it.

Sources: the augmentation of SSD (Liu et al. 2016, arXiv:1512.02325, section 2.2 and its code) in
the order PP-YOLOE uses it (arXiv:2203.16250): distort, expand, crop, flip, resize.  Letterbox and
the change in HSV are those of YOLOv5.
"""

import math
from typing import NamedTuple

import cv2
import numpy as np

from ppdist.config.augment import AugmentConfig
from ppdist.config.data import Resize

FILL = (124, 116, 104)  # mean colour of ImageNet, RGB; what lies beside an expanded image
GREY = (114, 114, 114)  # what lies beside a letterboxed one, and between the images of a mosaic
_INTERPOLATIONS = (
    cv2.INTER_NEAREST,
    cv2.INTER_LINEAR,
    cv2.INTER_CUBIC,
    cv2.INTER_AREA,
    cv2.INTER_LANCZOS4,
)
_CROP_OVERLAPS = (None, 0.0, 0.1, 0.3, 0.5, 0.7, 0.9)  # None: no crop
_CROP_TRIES = 50
_STRIP = 64  # rows at once: what three steps in a row work on stays in the cache, twice as fast
_SMALLEST_SIDE = 1.0  # input pixels: less of a box is no object to learn


class Placement(NamedTuple):
    """Which part of the original fills which part of the input, both in whole pixels x1 y1 x2 y2.

    What the part does not fill is `fill` (RGB).  mirror_x, mirror_y: the input is mirrored at last.
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
        """(y, x): pixels of the input for one of the original."""
        x1, y1, x2, y2 = self.source
        left, top, right, bottom = self.target
        return (bottom - top) / (y2 - y1), (right - left) / (x2 - x1)


def whole(width: int, height: int, size: tuple[int, int]) -> Placement:
    """The whole image stretched to the input `size` (height, width), as PP-YOLOE evaluates."""
    return Placement((0, 0, width, height), (0, 0, size[1], size[0]), *size)


def letterbox(width: int, height: int, size: tuple[int, int]) -> Placement:
    """The whole image in the middle of the input `size` (height, width), its shape kept.

    scale = min(input height / height, input width / width)
    side  = floor(side of the image * scale + 1/2), 1 at least
    start = (side of the input - side) // 2
    """
    scale = min(size[0] / height, size[1] / width)
    tall = max(1, min(size[0], math.floor(height * scale + 0.5)))
    wide = max(1, min(size[1], math.floor(width * scale + 0.5)))
    top, left = (size[0] - tall) // 2, (size[1] - wide) // 2
    target = (left, top, left + wide, top + tall)
    return Placement((0, 0, width, height), target, *size, fill=GREY)


def fitted(width: int, height: int, size: tuple[int, int], resize: Resize) -> Placement:
    """The whole image in the input `size` (height, width), as evaluation sees it."""
    return (letterbox if resize == "letterbox" else whole)(width, height, size)


def random_placement(
    boxes_M4: np.ndarray,
    width: int,
    height: int,
    size: tuple[int, int],
    config: AugmentConfig,
    rng: np.random.Generator,
    resize: Resize = "stretch",
    reduced: int = 1,
) -> Placement:
    """Expand, crop and mirror: where a training image goes in the input `size` (height, width).

    Args:
        reduced: a part of the image begins and ends at multiples of so many of its pixels.
    """
    window = everything = np.array([0.0, 0.0, width, height])
    if rng.random() < config.expand:
        window = expanded(window, config.expand_most, rng)
    if rng.random() < config.crop and len(boxes_M4):
        window = cropped(window, boxes_M4, config.crop_least, rng)
    if resize == "stretch":
        placement = place(window, width, height, size, reduced)
    elif np.array_equal(window, everything):
        placement = letterbox(width, height, size)  # in the very pixels of evaluation
    else:
        around = grown(window, size)
        placement = place(around, width, height, size, reduced)._replace(fill=GREY)
    mirror_x, mirror_y = rng.random() < config.flip, rng.random() < config.flip_vertical
    return placement._replace(mirror_x=mirror_x, mirror_y=mirror_y)


def grown(window: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The smallest window (x1, y1, x2, y2) around the given one that is shaped like the input."""
    sides = window[2:] - window[:2]
    shape = np.array([size[1], size[0]], np.float64)
    room = shape * (sides / shape).max() - sides
    return np.concatenate([window[:2] - room / 2, window[2:] + room / 2])


def expanded(window: np.ndarray, most: float, rng: np.random.Generator) -> np.ndarray:
    """A window (x1, y1, x2, y2) of 1 to `most` times each side that holds the given one."""
    sides = window[2:] - window[:2]
    room = sides * (rng.uniform(1.0, most) - 1.0)
    corner = window[:2] - rng.random(2) * room
    return np.concatenate([corner, corner + sides + room])


def cropped(
    window: np.ndarray, boxes_M4: np.ndarray, least: float, rng: np.random.Generator
) -> np.ndarray:
    """A part of a window whose IoU with some box reaches a random threshold.

    Thresholds are tried in random order, each with 50 random parts of aspect 0.5 to 2; the part
    holds the centre of a box, at least.  One of the thresholds, and failing at all, is no crop.
    """
    sides = window[2:] - window[:2]
    centres_M2 = (boxes_M4[:, :2] + boxes_M4[:, 2:]) / 2
    for choice in rng.permutation(len(_CROP_OVERLAPS)):
        overlap = _CROP_OVERLAPS[choice]
        if overlap is None:
            return window
        scale_T = rng.uniform(least, 1.0, _CROP_TRIES)
        aspect_T = rng.uniform(np.maximum(0.5, scale_T**2), np.minimum(2.0, scale_T**-2))
        part_T2 = np.stack([scale_T * np.sqrt(aspect_T), scale_T / np.sqrt(aspect_T)], 1) * sides
        corner_T2 = window[:2] + rng.random((_CROP_TRIES, 2)) * (sides - part_T2)
        parts_T4 = np.concatenate([corner_T2, corner_T2 + part_T2], 1)
        inside_TM = (
            (centres_M2 > parts_T4[:, None, :2]) & (centres_M2 < parts_T4[:, None, 2:])
        ).all(2)
        good_T = inside_TM.any(1) & (_iou(parts_T4, boxes_M4).max(1) >= overlap)
        if good_T.any():
            return parts_T4[good_T.argmax()]
    return window


def _iou(a_T4: np.ndarray, b_M4: np.ndarray) -> np.ndarray:
    low_TM2 = np.maximum(a_T4[:, None, :2], b_M4[:, :2])
    high_TM2 = np.minimum(a_T4[:, None, 2:], b_M4[:, 2:])
    inter_TM = (high_TM2 - low_TM2).clip(0).prod(2)
    area_T = (a_T4[:, 2:] - a_T4[:, :2]).prod(1)
    area_M = (b_M4[:, 2:] - b_M4[:, :2]).prod(1)
    return inter_TM / (area_T[:, None] + area_M - inter_TM)


def place(
    window: np.ndarray, width: int, height: int, size: tuple[int, int], reduced: int = 1
) -> Placement:
    """Rounds a window (x1, y1, x2, y2; original pixels, may reach beyond the image) to pixels.

    Boxes mapped by the result lie exactly where `render` puts their pixels.

    Args:
        reduced: of the image to be rendered: the window is rounded to its pixels.
    """
    limit = np.array([width, height])
    low, high = np.floor(window[:2] / reduced), np.ceil(window[2:] / reduced)
    low, high = (low * reduced).clip(0, limit - 1), (high * reduced).clip(1, limit)
    high = np.maximum(high, low + 1)
    scale = np.array([size[1], size[0]]) / (window[2:] - window[:2])
    target_low = np.rint((low - window[:2]) * scale).clip(0, [size[1] - 1, size[0] - 1])
    target_high = np.rint((high - window[:2]) * scale).clip(target_low + 1, [size[1], size[0]])
    x1, y1, x2, y2 = (int(value) for value in (*low, *high))
    left, top, right, bottom = (int(value) for value in (*target_low, *target_high))
    return Placement((x1, y1, x2, y2), (left, top, right, bottom), *size)


def map_boxes(boxes_M4: np.ndarray, placement: Placement) -> tuple[np.ndarray, np.ndarray]:
    """Boxes in input pixels, cut to what is seen, and keep_M: which are still objects.

    An object stays when its centre is seen and both sides have a pixel at least.
    """
    source, target = np.array(placement.source, np.float64), np.array(placement.target, np.float64)
    scale = (target[2:] - target[:2]) / (source[2:] - source[:2])
    mapped_M22 = (boxes_M4.reshape(-1, 2, 2) - source[:2]) * scale + target[:2]
    centre_M2 = mapped_M22.mean(1)
    cut_M22 = mapped_M22.clip(target[:2], target[2:])
    seen_M = ((centre_M2 > target[:2]) & (centre_M2 < target[2:])).all(1)
    keep_M = seen_M & (cut_M22[:, 1] - cut_M22[:, 0] >= _SMALLEST_SIDE).all(1)
    if placement.mirror_x:
        cut_M22[:, :, 0] = placement.width - cut_M22[:, ::-1, 0]
    if placement.mirror_y:
        cut_M22[:, :, 1] = placement.height - cut_M22[:, ::-1, 1]
    return cut_M22.reshape(-1, 4).astype(np.float32), keep_M


def render(
    image_HW3: np.ndarray,
    placement: Placement,
    interpolation: int,
    colours_34: np.ndarray | None = None,
    reduced: int = 1,
) -> np.ndarray:
    """The input image, uint8 RGB [placement.height, placement.width, 3].

    Args:
        image_HW3: the image, or with `reduced` a reduction of it (see `read_image`).
        interpolation: one of OpenCV's.
        colours_34: what `random_colours` gave; applied to the image, not to what lies beside it.
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
        both = placement.mirror_x and placement.mirror_y
        part = cv2.flip(part, -1 if both else int(placement.mirror_x))
    return part


def random_interpolation(rng: np.random.Generator) -> int:
    return _INTERPOLATIONS[rng.integers(len(_INTERPOLATIONS))]


_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.321], [0.211, -0.523, 0.311]])


def random_colours(chance: float, rng: np.random.Generator) -> np.ndarray | None:
    """Brightness, contrast, saturation and hue as one matrix [3, 4] on (R, G, B, 1); None: none.

    Saturation scales and hue turns the colour plane (I, Q) of YIQ, so all four are linear and one
    rounding suffices; they commute with the resize and run on the smaller image.
    """
    brightness_on, contrast_on, saturation_on, hue_on = rng.random(4) < chance
    shift = rng.uniform(-32, 32) * brightness_on
    gain = 1 + rng.uniform(-0.5, 0.5) * contrast_on
    saturation = 1 + rng.uniform(-0.5, 0.5) * saturation_on
    angle = np.deg2rad(rng.uniform(-18, 18) * hue_on)
    if not (brightness_on or contrast_on or saturation_on or hue_on):
        return None
    turn = np.eye(3)
    turn[1:, 1:] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    turn[1:, 1:] *= saturation
    rgb_33 = gain * np.linalg.inv(_YIQ) @ turn @ _YIQ
    return np.concatenate([rgb_33, np.full((3, 1), shift)], 1)


def random_hsv(
    gains: tuple[float, float, float], rng: np.random.Generator
) -> tuple[float, float, float]:
    """Turn of the hue (share of the circle), change of saturation and of value (shares of them).

    Each is uniform, up to its gain either way.
    """
    turn, saturation, value = (rng.uniform(-1, 1, 3) * gains).tolist()
    return turn, saturation, value


def recolour_hsv(image_HW3: np.ndarray, change: tuple[float, float, float]) -> np.ndarray:
    """The RGB image with what `random_hsv` gave applied to it; the turn within +-0.4.

    A linear map of (H, S, V) that saturates, in a ninth of the time of a table.  What it adds to a
    hue must not lead below 0, so a turn back is one forth with red and blue exchanged, which turns
    the circle over.
    """
    turn, saturation, value = change
    to_hsv, to_rgb = cv2.COLOR_RGB2HSV, cv2.COLOR_HSV2RGB
    if turn < 0:
        to_hsv, to_rgb = cv2.COLOR_BGR2HSV, cv2.COLOR_HSV2BGR
    hue = 180 * abs(turn)  # OpenCV's circle; up to 255 its way back goes on past the full one
    map_34 = np.array([[1, 0, 0, hue], [0, 1 + saturation, 0, 0], [0, 0, 1 + value, 0]])
    recoloured_HW3 = np.empty_like(image_HW3)
    for top in range(0, len(image_HW3), _STRIP):
        hsv_SW3 = cv2.cvtColor(image_HW3[top : top + _STRIP], to_hsv)
        cv2.transform(hsv_SW3, map_34, dst=hsv_SW3)
        cv2.cvtColor(hsv_SW3, to_rgb, dst=recoloured_HW3[top : top + _STRIP])
    return recoloured_HW3


def resize_for_evaluation(
    image_HW3: np.ndarray, size: tuple[int, int], resize: Resize = "stretch"
) -> np.ndarray:
    """What evaluation and inference see: the whole image in the input `size` (height, width).

    Stretched cubic, as PP-YOLOE does, or letterboxed linear, as YOLOv5 does.
    """
    height, width = image_HW3.shape[:2]
    interpolation = cv2.INTER_LINEAR if resize == "letterbox" else cv2.INTER_CUBIC
    return render(image_HW3, fitted(width, height, size, resize), interpolation)

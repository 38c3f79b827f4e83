"""Pixel augmentations: colours, blur, grey, erase.

A new one is a key of `data.augment`, a function here, and its row of `PIXEL_STEPS`.  If pixels are
hidden, objects of which too little is visible are dropped; the boxes of the others shrink to their
visible part.

Sources: random erasing (Zhong et al. 2017, arXiv:1708.04896, section 3.2), of the whole image.
Changes of colour (`distort`) are those of SSD, of HSV those of YOLOv5.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import cv2
import numpy as np

from ppdist.config.augment import AugmentConfig
from ppdist.data.types import Sample

_BLUR = (0.5, 2.0)  # standard deviation, input pixels
_STRIP = 64  # rows per pass: they stay in the CPU cache for all three operations, twice as fast
_ERASED = (0.02, 0.2)  # of the input's area
_ASPECTS = (0.3, 1 / 0.3)
_LEAST_LEFT = 1 / 3  # of a box's pixels: with less, the object is dropped
_LEAST_SIDE = 2  # input pixels
_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.321], [0.211, -0.523, 0.311]])


def random_colours(chance: float, rng: np.random.Generator) -> np.ndarray | None:
    """Draws a colour change as one matrix [3, 4]; None: no change.

    It acts on (R, G, B, 1) and combines brightness, contrast, saturation and hue.  Saturation
    scales and hue turns the colour plane (I, Q) of YIQ, so all four are linear and one rounding
    suffices; they commute with the resize and run on the smaller image.
    """
    brightness_on, contrast_on, saturation_on, hue_on = rng.random(4) < chance
    # All numbers are drawn, used or not, so that later ones do not depend on `chance`.
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


def recolour_hsv(image_HW3: np.ndarray, change: tuple[float, float, float]) -> np.ndarray:
    """Changes hue, saturation and value of an RGB image.

    Rotates hue by a fraction of the circle, within +-0.4; changes saturation and value by a
    fraction of their values.  A linear map of (H, S, V) that saturates takes a ninth of the time of
    a lookup table.  It must not make a hue negative, so a rotation backwards is done forwards with
    red and blue exchanged, which reverses the circle.
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


def erase_rectangle(
    image_HW3: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Fills a random rectangle with noise.

    Its area is uniform in 2 to 20 % of the image's, its aspect log-uniform in 0.3 to 3.3; it lies
    inside the image.

    Returns: the image and hidden_HW, uint8: 1 in the rectangle.
    """
    height, width = image_HW3.shape[:2]
    pixels = rng.uniform(*_ERASED) * height * width
    aspect = math.exp(rng.uniform(math.log(_ASPECTS[0]), math.log(_ASPECTS[1])))
    wide = min(width, max(1, round(math.sqrt(pixels * aspect))))
    tall = min(height, max(1, round(math.sqrt(pixels / aspect))))
    left, top = int(rng.integers(width - wide + 1)), int(rng.integers(height - tall + 1))
    noise_HW3 = np.frombuffer(rng.bytes(tall * wide * 3), np.uint8).reshape(tall, wide, 3)
    image_HW3, hidden_HW = image_HW3.copy(), np.zeros((height, width), np.uint8)
    image_HW3[top : top + tall, left : left + wide] = noise_HW3
    hidden_HW[top : top + tall, left : left + wide] = 1
    return image_HW3, hidden_HW


def hsv(sample: Sample, augment: AugmentConfig, rng: np.random.Generator) -> Sample:
    if not any(augment.hsv):
        return sample
    turn, saturation, value = (rng.uniform(-1, 1, 3) * augment.hsv).tolist()
    return replace(sample, image_HW3=recolour_hsv(sample.image_HW3, (turn, saturation, value)))


def blur(sample: Sample, augment: AugmentConfig, rng: np.random.Generator) -> Sample:
    if not (augment.blur and rng.random() < augment.blur):
        return sample
    deviation = rng.uniform(*_BLUR)
    return replace(sample, image_HW3=cv2.GaussianBlur(sample.image_HW3, (0, 0), deviation))


def grey(sample: Sample, augment: AugmentConfig, rng: np.random.Generator) -> Sample:
    if not (augment.grey and rng.random() < augment.grey):
        return sample
    brightness_HW = cv2.cvtColor(sample.image_HW3, cv2.COLOR_RGB2GRAY)
    return replace(sample, image_HW3=cv2.cvtColor(brightness_HW, cv2.COLOR_GRAY2RGB))


def erase(sample: Sample, augment: AugmentConfig, rng: np.random.Generator) -> Sample:
    if not (augment.erase and rng.random() < augment.erase):
        return sample
    image_HW3, hidden_HW = erase_rectangle(sample.image_HW3, rng)
    return drop_hidden_objects(replace(sample, image_HW3=image_HW3), hidden_HW)


# In order of application, after several images were combined.  Each is named like its key
# of `data.augment`.  A disabled step draws no random number, so that the samples of other
# configurations do not change.
PIXEL_STEPS: tuple[Callable[[Sample, AugmentConfig, np.random.Generator], Sample], ...] = (
    hsv,
    blur,
    grey,
    erase,
)


def augment_pixels(sample: Sample, augment: AugmentConfig, rng: np.random.Generator) -> Sample:
    for step in PIXEL_STEPS:
        sample = step(sample, augment, rng)
    return sample


def drop_hidden_objects(sample: Sample, hidden_HW: np.ndarray) -> Sample:
    """Drops the objects of a sample that are hidden, and shrinks the others to what is visible."""
    boxes_M4, keep_M = clip_to_visible(sample.boxes_M4, hidden_HW)
    return replace(sample, boxes_M4=boxes_M4[keep_M], labels_M=sample.labels_M[keep_M])


def clip_to_visible(boxes_M4: np.ndarray, hidden_HW: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shrinks boxes to their visible part.

    A side moves only past rows or columns that are hidden all along the box.

    Args:
        boxes_M4: float32, xyxy, pixels of the input.
        hidden_HW: uint8, not 0 where the input shows something else.
    Returns: boxes_M4 and keep_M, which stay objects: a third of the box is visible, with at least 2
        pixels along each side.
    """
    boxes_M4, keep_M = boxes_M4.copy(), np.ones(len(boxes_M4), bool)
    for number, box in enumerate(boxes_M4):
        left, top = int(box[0]), int(box[1])
        hidden = hidden_HW[top : math.ceil(box[3]), left : math.ceil(box[2])] != 0
        if not hidden.any():
            continue
        columns, rows = np.flatnonzero(~hidden.all(0)), np.flatnonzero(~hidden.all(1))
        keep_M[number] = (
            hidden.mean() <= 1 - _LEAST_LEFT and min(len(columns), len(rows)) >= _LEAST_SIDE
        )
        if keep_M[number]:
            box[:2] = np.maximum(box[:2], [left + columns[0], top + rows[0]])
            box[2:] = np.minimum(box[2:], [left + columns[-1] + 1, top + rows[-1] + 1])
    return boxes_M4, keep_M

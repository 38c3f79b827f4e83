"""Pixel augmentations of a finished input: blur, grey, erase.

Objects of which too little is left go; the boxes of others shrink to what is still to be seen.

Sources: random erasing (Zhong et al. 2017, arXiv:1708.04896, section 3.2), of the whole image.
"""

import math

import cv2
import numpy as np

_BLUR = (0.5, 2.0)  # standard deviation, input pixels
_ERASED = (0.02, 0.2)  # of the input's area
_ASPECTS = (0.3, 1 / 0.3)
_LEAST_LEFT = 1 / 3  # of a box's pixels: less is no object to learn
_LEAST_SIDE = 2  # input pixels


def blurred(image_HW3: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return cv2.GaussianBlur(image_HW3, (0, 0), rng.uniform(*_BLUR))


def without_colours(image_HW3: np.ndarray) -> np.ndarray:
    """As bright as before, in RGB."""
    return cv2.cvtColor(cv2.cvtColor(image_HW3, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)


def erased(image_HW3: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The image with noise in a random rectangle, and hidden_HW: uint8, 1 there, else 0.

    Its area is uniform in 2 to 20 % of the image's, its aspect log-uniform in 0.3 to 3.3; it lies
    inside the image.
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


def left_of(boxes_M4: np.ndarray, hidden_HW: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Boxes around what is left of them where pixels are hidden, and keep_M: which stay objects.

    An object stays when a third of its box is still seen, 2 pixels a side.  A side moves only past
    rows or columns that are hidden all along the box.

    Args:
        boxes_M4: float32, xyxy, pixels of the input.
        hidden_HW: uint8, not 0 where the input shows something else.
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

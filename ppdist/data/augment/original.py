"""One image as augmentation begins with it: read, turned by quarters, and what is one object."""

from dataclasses import dataclass

import cv2
import numpy as np

from ppdist.data.augment.affine import map_points
from ppdist.data.sample import ImageRecord

_TURNS = {1: cv2.ROTATE_90_CLOCKWISE, 2: cv2.ROTATE_180, 3: cv2.ROTATE_90_COUNTERCLOCKWISE}


@dataclass(frozen=True, slots=True)
class Original:
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


def random_turn(chance: float, rng: np.random.Generator) -> int:
    """Quarter turns clockwise, 0 to 3; nothing is drawn where there is no chance."""
    return int(rng.integers(1, 4)) if chance and rng.random() < chance else 0


def turned_sides(record: ImageRecord, turn: int) -> tuple[int, int]:
    """(width, height) after so many quarter turns."""
    return (record.height, record.width) if turn % 2 else (record.width, record.height)


def turned_pixels(image_HW3: np.ndarray, turn: int) -> np.ndarray:
    """The image after so many quarter turns clockwise."""
    return cv2.rotate(image_HW3, _TURNS[turn]) if turn else image_HW3


def original_of(
    index: int, image_HW3: np.ndarray, reduced: int, record: ImageRecord, turn: int
) -> Original:
    """Args: image_HW3: of `record`, reduced, not yet turned."""
    width, height = turned_sides(record, turn)
    alone_M = ~record.crowd_M
    boxes_M4, outlines_M = record.boxes_M4[alone_M], record.polygons_M
    if outlines_M:
        outlines_M = tuple(outlines_M[number] for number in np.flatnonzero(alone_M))
    if turn:
        image_HW3, matrix_33 = turned_pixels(image_HW3, turn), _matrix_of(turn, record)
        boxes_M4 = _turned_boxes(boxes_M4, matrix_33)
        outlines_M = tuple(
            tuple(map_points(outline_K2, matrix_33) for outline_K2 in outlines)
            for outlines in outlines_M
        )
    return Original(
        index,
        image_HW3,
        reduced,
        width,
        height,
        boxes_M4,
        record.labels_M[alone_M],
        outlines_M,
    )


def _matrix_of(turn: int, record: ImageRecord) -> np.ndarray:
    """Pixels of the image -> pixels of the turned one, edges counted."""
    width, height = record.width, record.height
    rows = {
        1: [[0, -1, height], [1, 0, 0]],
        2: [[-1, 0, width], [0, -1, height]],
        3: [[0, 1, 0], [-1, 0, width]],
    }[turn]
    return np.array([*rows, [0, 0, 1]], np.float64)


def _turned_boxes(boxes_M4: np.ndarray, matrix_33: np.ndarray) -> np.ndarray:
    corners_M22 = map_points(boxes_M4.reshape(-1, 2, 2).astype(np.float64), matrix_33)
    turned_M4 = np.concatenate([corners_M22.min(1), corners_M22.max(1)], 1)
    return turned_M4.astype(np.float32)
